"""`ffn explain` as a user asks it."""

import json

import ffncli
from ffncli.run.topics.call import topics


def test_a_topic_on_its_page(call):
    code, out, err = call("explain", "gelu")
    topic = ffncli.explain("gelu")
    assert (code, err) == (0, "")
    assert out.startswith("gelu  an activation function: x Φ(x)\n  gelu(x) = x Φ(x): each number is")
    assert all(f"  {sentence}\n" in out for sentence in topic.sentences)
    assert f"\nin full: {topic.example.command}\n" in out
    assert "-0.0000" not in call("explain", "neuron")[1]
    assert "-0.7500  -0.1700   0.0008  0.0000\n" in out  # a slope of 0.00077 reads like the others
    assert out.endswith(
        "\nnext  ffn activations gelu relu --plot\n  source: Hendrycks & Gimpel 2016, arXiv:1606.08415\n"
    )


def test_the_library_gives_the_same(call):
    for name in ("gelu", "moe"):
        found = json.loads(call("explain", name, "--json")[1])
        topic = ffncli.explain(name)
        assert (found["command"], found["topic"], found["title"]) == ("explain", topic.topic, topic.title)
        assert (found["sentences"], found["next"]) == (list(topic.sentences), topic.next)
        assert found["example"] == {
            "command": topic.example.command,
            "columns": list(topic.example.columns),
            "rows": [list(row) for row in topic.example.rows],
        }
        assert (found["sources"], found["aliases"]) == (list(topic.sources), list(topic.aliases))


def test_csv_has_the_numbers_in_full(csv_of):
    rows = csv_of("explain", "gelu")
    assert [float(row["gelu"]) for row in rows] == [row[1] for row in ffncli.explain("gelu").example.rows]


def test_alone_it_lists_the_topics(call, stdout_of):
    out = stdout_of("explain")
    listed = [line.split()[0] for line in out.splitlines()[1:] if line]
    assert listed == [*(line.topic for line in topics()), "next"]
    assert listed[:6] == ["ffn", "activation", "gate", "4x", "neuron", "moe"]
    rows = json.loads(call("explain", "--json")[1])["rows"]
    assert [row["topic"] for row in rows] == listed[:-1]
    assert rows[5]["aliases"][0] == "experts"


def test_markdown_and_a_file(call, tmp_path):
    path = tmp_path / "gate.md"
    assert call("explain", "gate", "--format", "md", "-o", str(path))[:2] == (0, "")
    assert path.read_text("utf-8").startswith("### gate\n")


def test_a_newcomer_is_sent_here(call):
    assert "ffn explain                         # new here? start with this" in call()[2]
