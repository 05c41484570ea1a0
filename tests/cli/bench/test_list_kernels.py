"""`ffn bench --list-kernels`."""

import json

import pytest

from ffncli.kernels import BUILT_IN, BY_DEFAULT, built_in, kernel_list


def test_every_kernel_is_listed_with_what_its_row_says(call):
    code, out, err = call("bench", "--list-kernels", "--device", "cpu", "--json")
    assert (code, err) == (0, "")
    rows = {row["kernel"]: row for row in json.loads(out)["rows"]}
    assert list(rows) == list(BUILT_IN)
    for name, row in rows.items():
        kernel = built_in(name)
        assert row["computes"]
        assert row["passes"] == ("forward+backward" if kernel.trains else "forward")
        assert row["by_default"] == (name in BY_DEFAULT)
        assert (row["missing"] == "") == (kernel.missing("cpu") is None)
    assert (rows["grouped"]["blocks"], rows["eager"]["blocks"]) == ("mixtures", "dense and mixtures")
    assert (rows["mkl"]["dtypes"], rows["packed"]["dtypes"]) == (["fp32"], ["fp32", "bf16", "fp16", "fp64"])
    assert (rows["quack"]["devices"], rows["quack"]["needs"]) == (["cuda"], ["sm_90", "quack"])
    assert (rows["numpy"]["devices"], rows["packed"]["devices"]) == (["cpu"], ["cpu", "cuda"])
    assert rows["max_autotune"]["missing"] == "runs on a GPU only"
    assert kernel_list("cuda")[list(rows).index("numpy")].missing == "runs on a CPU only"


def test_the_page_and_the_csv(call):
    out = call("bench", "--list-kernels")[1]
    assert out.startswith("eager  in plain torch functions, as written by hand; this is the baseline\n")
    lines = call("bench", "--list-kernels", "--csv")[1].splitlines()
    assert len(lines) == 1 + len(BUILT_IN)


@pytest.mark.parametrize("options", [("4x8",), ("--save", "a.csv"), ("-n", "3"), ("--suite", "ffn-1")])
def test_it_measures_nothing(call, options):
    code, _, err = call("bench", *options, "--list-kernels")
    assert (code, "it measures nothing" in err) == (2, True), err
