"""`activations_of`: the library's call finds what `ffn activations --source` shows."""

import json
from dataclasses import asdict

from ffncli.run.activations.call import activations_of
from ffncli.run.activations.question import DataQuestion


def test_the_call_finds_what_the_command_shows(call):
    code, out, _ = call("activations", "relu", "--source", "8x16:gelu", "--tokens", "5", "--seed", "2", "--json")
    (layer,) = activations_of(DataQuestion(source="8x16:gelu", tokens=5, seed=2), ("relu",)).layers
    rows = json.loads(out)["rows"]
    assert code == 0
    for made, row in zip(layer.activations[0].made, rows, strict=True):
        assert {key: row[key] for key in asdict(made)} == json.loads(json.dumps(asdict(made)))
