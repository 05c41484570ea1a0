from __future__ import annotations

import json


def test_first(call):
    code, out, err = call("params", "llama-2-7b", "gpt2", "mixtral-8x7b", "--format", "json")
    rows = json.loads(out)["rows"]
    assert code == 0 and err == ""
    assert [r["ffn_params_per_layer"] for r in rows[:2]] == [135_266_304, 4_722_432]
    assert (rows[2]["ffn_params_total"], rows[2]["ffn_params_active"]) == (45_098_205_184, 11_275_337_728)
