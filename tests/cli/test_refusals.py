"""Command lines of every command that are refused: one line that says what is wrong and what to do, and no file."""

import shlex

import pytest

from ffncli.kernels import BUILT_IN
from tests.oracles.checkpoints import expect_refusal


def counted(last: int) -> str:
    return ",".join(map(str, range(1, last + 1)))


HUGE = "1" + "0" * 30
LONG = "9" * 5000
NO_SIZES = ["0", "-4", HUGE, "abc", "", "4.5", "1e3", "nan", "0x10", " ", LONG]
NO_NATURALS = ["-1", "1.5", "x", "", HUGE, "³", "٣", LONG]
NO_WIDTHS = ["0", HUGE, "4.5", "1e3", LONG]
NO_RANKS = ["0", "-1", "x", "", "1.5", "65537", LONG]
NO_DTYPES = ["int9", "q4_9", "", "fp4", "\x1b[31m"]
BENCH = "bench 8x16:swiglu --device cpu"
GRID = "bench 8x16:swiglu -k eager,packed --processes 2 --save a.csv"
RAY = "--launcher ray --device cpu --threads 1"
EXPLAIN = "trace --example notebook --explain"
OF_EXPERTS = "trace 8x16:swiglu --experts 4 --tokens 6 --explain"

# (the command line, what the error says...); with the exit code first if that is not 2
REFUSED = [
    # names
    ("params lama-2-7b", "'lama-2-7b'", "did you mean 'llama-2-7b'"),
    ("trace gtp2", "'gtp2'", "did you mean", "'gpt2'"),
    ("params zzzz", "unknown model 'zzzz'", "`ffn models`"),
    ("params ''", "unknown model ''"),
    ("params gpt2 lama-2-7b", "'lama-2-7b'"),
    ("params ./gpt2", "gpt2 does not exist", "'gpt2'"),
    ("params ./none/here", "none/here does not exist"),
    ("params model.gguf", "model.gguf"),
    (f"params {5000 * 'x'}", "too long"),
    ("params 'a\x00b'", "'a\\x00b'"),
    ("params '~nobody-here/x'", "~nobody-here/x"),
    ("models zzzz", "'zzzz'", "`ffn models`"),
    ("models lamma-2-7b", "'lamma-2-7b'", "did you mean 'llama-2-7b'"),
    ("params 4x8:gleu", "'gleu'", "did you mean", "'gelu'"),
    ("params 4x8:zzz", "unknown activation 'zzz'", "known: ", "swiglu"),
    ("params 4x8:", "unknown activation ''"),
    ("params 4x8 --activation sliu", "--activation", "'sliu'", "did you mean 'silu'"),
    ("params 4x8 --activation ''", "--activation", "''"),
    ("params 4x8 --activation '__import__(\"os\")'", "--activation", '__import__("os")'),
    ("params 4x8 --norm rmsnrom", "--norm", "'rmsnrom'", "did you mean 'rmsnorm'"),
    ("params 4x8 --norm ''", "--norm", "none, layernorm, rmsnorm"),
    ("params 4x8 --norm-position mid", "--norm-position", "'mid'", "pre+branch"),
    ("params 4x8 --dtype f23", "--dtype", "'f23'", "did you mean 'f32'"),
    ("params 4x8 --dtype int9", "--dtype", "'int9'", "did you mean 'int"),
    ("params 4x8 --dtype ''", "--dtype", "''"),
    ("trace 4x8 --dtype f8", "--dtype", "'f8'"),
    ("trace 4x8 --device mps", "--device", "(mps)", "cpu"),
    ("trace 4x8 --device cuda:-1", "--device", "'cuda:-1'"),
    ("trace 4x8 --device cuda:x", "--device", "'cuda:x'"),
    ("trace 4x8 --device 'cuda:³'", "--device", "cuda:³"),
    ("trace 4x8 --device ''", "--device", "''"),
    ("params 4x8 --format jsno", "--format", "'jsno'", "table, json, csv or md"),
    ("params 4x8 --format ''", "--format", "''"),
    ("parms", "parms", "did you mean 'params'"),
    ("zzz", "zzz", "commands: explain, trace"),
    ("''", "command ''"),
    ("params --fromat json", "--fromat", "--format"),
    ("params --layer 3", "--layer", "ffn params --help"),
    ("trace 4x8 5x8", "5x8", "ffn trace --help"),
    ("params gpt2 --dtype", "--dtype", "argument"),
    ("params --d-ff 8", "--d-model"),
    ("'\x1b[31m'", "\\x1b[31m"),
    ("params '\x1b[31m[/x]'", "\\x1b[31m"),
    ("params 4x8 '--\x1b[31m'", "--\\x1b[31m"),
    ("params 'a\nb'", "a\\nb"),
    # options that contradict each other
    ("params 4x8 --json --csv", "json and csv contradict"),
    ("params 4x8 --json --format md", "json and md contradict"),
    ("trace 4x8 --tokens 2 --batch 2", "--tokens contradicts --batch"),
    ("trace 4x8 --tokens 2 --seq-len 2", "--tokens contradicts", "--seq-len"),
    ("trace --d-model 4 --activation swiglu --plain", "swiglu", "--plain", "--activation silu"),
    ("params gpt2 --activation geglu --plain", "geglu", "--plain", "--activation gelu"),
    ("params 4x8 --top-k 2", "--top-k needs --experts"),
    ("params gpt2 --shared-experts 2", "--shared-experts needs --experts"),
    ("params 4x8 --experts 4 --top-k 9", "9", "4", "experts"),
    ("params mixtral-8x7b --experts 1", "--experts 1 is fewer than the 2", "--top-k, at most 1"),
    ("verify deepseek-v4-flash --d-model 8 --d-ff 8", "token ids", "--layer 3 has a router"),
    ("explain kimi-k3", "unknown topic", "ffn params kimi-k3"),
    ("params mixtral-8x7b --top-k 9", "9", "8", "experts"),
    ("params deepseek-v3 --experts 12", "12 experts", "8 groups"),
    ("trace 4x8 --input 1,2,3,4 --tokens 2", "--input has 4 values", "2 × 4 needs 8"),
    (
        "activations gelu --source gpt2 --prompt a --prompt b",
        "--prompt takes one text, got 2; ffn trace takes several",
    ),
    # ffn params
    ("params llama-2-7b --tp 7", "d_ff = 11008", "7 ranks", "nearest: 4 and 8"),
    ("params gpt2 --tp 5", "d_ff = 3072", "5 ranks", "nearest: 4 and 6"),
    ("params mixtral-8x7b --tp 3", "14336", "3 ranks", "nearest: 2 and 4"),
    ("params llama-2-7b gpt2 --tp 43", "3072", "43 ranks"),
    ("params 64x96 --tp 2 --dtype q4_0", "q4_0", "32"),
    ("params mixtral-8x7b --ep 3", "experts = 8", "3 ranks", "nearest: 2 and 4"),
    ("params gpt2 --ep 2", "no experts", "--tp"),
    ("params mixtral-8x7b --ep 0", "--ep"),
    ("params mixtral-8x7b --ep 2 --sweep d_ff=1x", "--sweep contradicts --ep"),
    ("params gpt2 --all", "--all contradicts SOURCE"),
    ("params --all --sweep d_ff=1x", "--sweep contradicts --all; it takes one SOURCE"),
    ("params gpt2 bert-base --sweep d_ff=1x", "--sweep takes one SOURCE"),
    ("params gpt2 --sweep d_ff=1x --tp 2", "--sweep contradicts --tp"),
    ("params gpt2 --sweep d_ff=1x --ridge 2", "--sweep contradicts --ridge"),
    ("params gpt2 --sweep d_ff=1x --ridge h100", "--sweep contradicts --ridge"),
    ("params gpt2 --sweep d_ff=1x --iso-params", "--sweep contradicts --iso-params"),
    ("params gpt2 --sweep d_ff=1x --multiple-of 4", "--multiple-of needs --iso-params"),
    ("params gpt2 --sweep d_ff=1x --tokens 1,2", "--sweep tokens=1,32,512"),
    ("params gpt2 --multiple-of 4", "--multiple-of needs --iso-params"),
    ("params gpt2 --iso-params --multiple-of 0", "--multiple-of", "0"),
    ("params gpt2 --sweep d_ff", "'d_ff' has no '='"),
    ("params gpt2 --sweep zz=1", "'zz'", "use one of d_model"),
    ("params gpt2 --sweep d_fff=1", "did you mean 'd_ff'"),
    ("params gpt2 --sweep d_ff=1x --sweep d_ff=2x", "d_ff is swept twice"),
    ("params gpt2 --sweep d_ff=", "--sweep"),
    ("params gpt2 --sweep d_ff=1:100000000:1", "--sweep"),
    ("params --sweep d_ff=1x", "--d-model"),
    ("params gpt2 --tokens 1,2 --batch 2", "--tokens contradicts --batch"),
    ("params gpt2 --ridge hh100", "--ridge", "unknown device 'hh100'", "did you mean 'h100'"),
    ("params gpt2 --ridge x", "--ridge", "unknown device 'x'", "for example"),
    ("params gpt2 --ridge h10", "--ridge", "is the beginning of H100 NVL, H100 PCIe, H100 SXM5", "type a longer part"),
    ("params gpt2 --ridge h100,", "--ridge", "number"),
    ("params gpt2 --ridge 3,h100", "--ridge", "a single number of FLOPs per byte or names"),
    ("params gpt2 --ridge 3,4", "--ridge", "a single number of FLOPs per byte"),
    ("params 100x200:relu --dtype q4_0", "q4_0", "row of 100", "another --dtype"),
    # ffn approximate
    ("approximate --target sine", "--target", "'sine'", "did you mean 'sin'"),
    ("approximate --target ''", "--target", "sin, abs, step, bump, and"),
    ("approximate --activation gleu", "--activation", "'gelu'"),
    ("approximate --d-ff 0", "--d-ff", "0"),
    ("approximate --d-ff 1000000000", "--d-ff", "4,096"),
    ("approximate --d-ff 1,,4", "--d-ff", "''"),
    ("approximate --d-ff 1.5x", "--d-ff", "1.5x"),
    ("approximate --domain 1:1", "--domain", "no width"),
    ("approximate --domain 2:1", "--domain", "ends before it begins"),
    ("approximate --domain nan:1", "--domain", "nan"),
    ("approximate --domain 0:1e30", "--domain", "1e+30"),
    ("approximate --domain 1", "--domain", "-pi:pi"),
    ("approximate --noise -1", "--noise", "-1"),
    ("approximate --noise nan", "--noise", "nan"),
    ("approximate --seeds 0", "--seeds", "0"),
    ("approximate --samples 1", "--samples", "2"),
    ("approximate --samples 100000 --d-ff 4096", "--samples", "limit"),
    ("approximate --samples 5000 --d-ff 3000 --seeds 1", "least squares", "--samples", "--d-ff"),
    (f"approximate --d-ff {counted(299)}", "1,000"),
    ("approximate --steps 0", "--steps", "0"),
    ("approximate --plot-file curves.gif", "--plot-file", ".svg"),
    # ffn export
    ("export 4x8", "Missing option '--as'", "torch, flashinfer-trace, onnx, latex"),
    ("export 4x8 --as torhc", "unknown form 'torhc'", "did you mean 'torch'?"),
    ("export 4x8 --as torch -o a.tex", "--as torch writes .py files", "-o NAME.py"),
    ("export 4x8 --as onnx", "--as onnx needs --output", "--output block.onnx"),
    ("export mixtral-8x7b --as onnx -o a.onnx", "is a mixture", "--as torch writes it"),
    ("export llama-2-7b --as onnx -o a.onnx", "271 MB", "--large writes it"),
    ("export --as torch", "--d-model is missing"),
    ("export 4x8 --as latex --layer 3", "out of range"),
    ("export no-such-model --as latex", "unknown model"),
    # ffn verify
    ("verify --check modul", "unknown check 'modul'", "did you mean 'module'?"),
    ("verify --kernel eager --check tokens", "--kernel contradicts --check tokens", "add kernels to"),
    ("verify --kernel fast", "unknown kernel 'fast'", ", ".join(BUILT_IN)),
    ("verify --tolerance -1", "--tolerance must be a number from 0"),
    (3, "verify --device cuda:77", "--device cuda:77: there "),
    ("verify --dtype int8", "--dtype int8 counts bytes only"),
    ("verify --layer 3", "--layer 3 is out of range"),
    ("verify --against nowhere/at/all", "does not exist"),
    ("verify --against gpt2", "--against 'gpt2' has no weights of its own"),
    ("verify --tokens 3 --batch 2", "contradicts"),
    ("verify --input 1,2,3", "not a multiple of d_model = 4"),
    # ffn trace --explain
    (f"{EXPLAIN} 'up[0,0,8]'", "--explain up[0,0,8]: 8 is out of range, up has shape [2, 3, 8]"),
    (f"{EXPLAIN} 'up[0,0,-9]'", "-9 is out of range, up has shape [2, 3, 8]"),
    (f"{EXPLAIN} 'up[5]'", "up has shape [2, 3, 8], so it needs 3 indices, not 1; such as up[0,0,0]"),
    (f"{EXPLAIN} 'upp[0,0,0]'", "--explain: no step 'upp'; did you mean 'up'?"),
    (f"{EXPLAIN} 'gate[0]'", "no step 'gate'; steps: x, up, act, dropout, down"),
    (f"{EXPLAIN} up", "--explain 'up' is not a place in a tensor; give NAME[i,j], such as up[0,3]"),
    (f"{EXPLAIN} 'up[]'", "is not a place"),
    (f"{EXPLAIN} 'up[a]'", "is not a place"),
    (f"{EXPLAIN} 'up[0,0,0'", "is not a place"),
    (f"{EXPLAIN} '[0]'", "is not a place"),
    (f"{EXPLAIN} ''", "is not a place"),
    (f"{EXPLAIN} 'up[٣,0,0]'", "is not a place"),
    (f"{EXPLAIN} 'up[99999999999999999999]'", "is not a place"),
    (f"{EXPLAIN} 'up[0,0,0]\x1b[2J'", "is not a place"),
    (f"{EXPLAIN} '\x1b[2J[0]'", "is not a place"),
    (f"{OF_EXPERTS} 'experts.4.gate[0,0]'", "no expert 4; experts has experts 0 to 3"),
    (f"{OF_EXPERTS} 'experts.0.gaet[0,0]'", "did you mean 'experts.0.gate'"),
    (f"{OF_EXPERTS} 'gate[0,0]'", "did you mean 'experts.0.gate'?"),
    (f"{OF_EXPERTS} 'experts.0.gate[9,0]'", "its rows are the tokens routed to expert 0: "),
    ("trace --explain 'up[0,0,0]' --terms 0", "--terms"),
    ("trace --explain 'up[0,0,0]' --terms x", "--terms"),
    ("trace --explain 'up[0,0,0]' --depth 0", "--depth"),
    ("trace --explain 'up[0,0,0]' --depth 100", "--depth"),
    ("trace --terms 3", "--terms needs --explain"),
    ("trace --depth 2", "--depth needs --explain"),
    (f"trace --explain {','.join(101 * ['up[0,0,0]'])}", "at most 100 places, got 101"),
    # ffn trace -o page.html
    ("trace 512x2048 -o page.html", "then ffn report t.safetensors"),
    ("trace 4x8:relu --tokens 2000 -o page.html", "values"),
    ("trace --example notebook -o page.html", "add --eval"),
    ("trace 4x8:relu --ablate unit:1 -o page.html", "--ablate contradicts --output .html"),
    ("trace 4x8:relu --set 'W1[0,3]=5' -o page.html", "--set contradicts --output .html"),
    ("trace 4x8:swiglu --experts 4 --ep 2 -o page.html", "--ep contradicts --output .html"),
    ("trace 4x8:relu --explain 'up[0,1]' -o page.html", "--explain contradicts --output .html"),
    ("trace 4x8:relu --json -o page.html", "--json contradicts --output .html"),
    # ffn trace over ranks
    ("trace llama-2-7b --tp 3", "d_ff = 11008", "nearest: 2 and 4"),
    ("trace mixtral-8x7b --ep 16", "experts = 8", "nearest: 8"),
    ("trace gpt2 --layer all --tp 2", "--tp contradicts --layer all"),
    ("trace 8x16 --tp x", "--tp"),
    # ffn bench
    (f"{BENCH} --kernel egaer", "did you mean 'eager'"),
    (f"{BENCH} --kernel none.py:f", "cannot read"),
    (f"{BENCH} --load-time long", "--load-time must be a time"),
    (f"{BENCH} --kernel slowed:1..2:eager", "'1..2' is not a factor"),
    (f"{BENCH} --kernel slowed:2:none.py:f", "cannot read"),
    (f"{BENCH} --by-step --pass forward+backward", "--by-step contradicts --pass forward+backward"),
    (f"{BENCH} --by-step --fail-if-slower 3%", "--by-step contradicts --fail-if-slower"),
    (f"{BENCH} --by-step --kernel eager", "--by-step contradicts --kernel"),
    (f"{BENCH} --processes 1 --fail-if-slower 3%", "--fail-if-slower contradicts --processes 1"),
    (f"{BENCH} --processes 1 --selftest", "--selftest contradicts --processes 1"),
    (f"{BENCH} --pass forward+backward --selftest", "--selftest contradicts --pass forward+backward; it slows"),
    (f"{BENCH} --baseline nobody", "there is no kernel 'nobody'"),
    (f"{BENCH} --precision 3", "write 3%"),
    (f"{BENCH} --precision 0%", "--precision must be a percentage above 0 and at most 50%, such as 3%"),
    (f"{BENCH} --fail-if-slower 3", "write 3%"),
    (f"{BENCH} --max-time soon", "as in 20s or 2m"),
    (f"{BENCH} --call-time 0", "--call-time must be a time up to a day, as in 20s or 2m"),
    (f"{BENCH} --memory-limit lots", "--memory-limit must be a size from 200.0 MB, as in 512MB or 4GiB, got 'lots'"),
    (f"{BENCH} --memory-limit 1KB", "--memory-limit must be a size from 200.0 MB, as in 512MB or 4GiB, got '1KB'"),
    (f"{BENCH} --cache hot", "unknown value 'hot'"),
    (f"{BENCH} --pass backward", "unknown value 'backward'"),
    (f"{BENCH} --dtype fp8", "--dtype"),
    (f"{BENCH} --tokens {counted(899)} --cache warm,flush --d-ff {counted(8)}", "a grid of 14,384 cases"),
    (f"{BENCH} --resume none.csv", "nothing to resume"),
    (f"{BENCH} --resume none.csv --save a.csv", "contradicts"),
    (f"{BENCH} --save a.txt", "must end in .csv"),
    (f"{BENCH} --sustained", "--sustained needs --device cuda"),
    (f"{BENCH} --routing uniform", "--routing needs a mixture of experts, and 8x16:swiglu is not one"),
    (f"{BENCH} --experts 4 --routing zipf", "'zipf' needs an exponent"),
    (f"{BENCH} --experts 4 --routing none.npz", "cannot read none.npz"),
    (f"{BENCH} --input none.safetensors", "cannot read none.safetensors"),
    (f"{BENCH} --selftest --kernel eager", "--selftest contradicts --kernel; it has its own"),
    (f"{BENCH} --launch graphs", "--launch graphs contradicts --device cpu"),
    (f"{BENCH} --launch graphs --by-step", "--by-step contradicts --launch graphs"),
    (f"{BENCH} --launch both", "--launch: unknown value 'both'"),
    # ffn bench --suite
    ("bench --suite ffn-2", "error: --suite: there is no suite 'ffn-2'; did you mean 'ffn-1'?"),
    ("bench --suite kernels", "error: --suite: there is no suite 'kernels'; the public suites are: ffn-1"),
    ("bench --admit a.csv", "error: --admit needs --suite; as in ffn bench --suite ffn-1 --admit FILE.csv"),
    ("bench --suite ffn-1 --admit none.csv", "error: cannot read none.csv: No such file or directory"),
    ("bench --suite ffn-1 --admit none.csv -k eager", "error: --admit contradicts --kernel; it measures nothing"),
    ("bench gpt2 --suite ffn-1 --admit none.csv", "error: --admit contradicts SOURCE; it measures nothing"),
    ("bench llama-2-7b --suite ffn-1", "error: --suite contradicts SOURCE; "),
    ("bench --suite ffn-1 --device cpu,cuda", "--device cpu,cuda: a suite has the tracks cpu and cuda; "),
    *(
        (f"bench --suite ffn-1 {option}", f"error: --suite contradicts {option.split()[0]}; ")
        for option in (
            "--tokens 1, --dtype bf16, --d-model 8, --threads 1, --cache warm, --pass forward, --routing text,"
            " --input x.safetensors, --baseline packed, --seed 2, --math-mode high, --allocator system,"
            " --launch plain, --tp 2, --by-step, --selftest, --sustained"
        ).split(", ")
    ),
    # ffn bench --launcher
    (f"{GRID} --launcher kube", "--launcher: unknown value 'kube'; use one of slurm, ray"),
    (f"{GRID} --launcher slrum", "did you mean 'slurm'"),
    (f"{GRID} --slots 2", "--slots needs --launcher"),
    (f"{GRID} --launcher-option a=b", "--launcher-option needs --launcher"),
    (f"{GRID} {RAY} --launcher-option partition", "'partition' is not KEY=VALUE"),
    (f"{GRID} {RAY} --launcher-option =x", "'=x' is not KEY=VALUE"),
    (f"{GRID} {RAY} --launcher-option partition=gpu", "ray has no option 'partition'"),
    (f"{GRID} --launcher ray --device cpu", "--launcher needs --threads"),
    (f"{GRID} --launcher ray --threads 1", "--launcher needs --device"),
    (f"{GRID} --launcher ray --threads 1 --device cuda:1", "--device cuda:1 contradicts --launcher"),
    (f"bench 8x16:swiglu {RAY} --selftest", "--selftest contradicts --launcher"),
    (f"{GRID} {RAY} --tp 2", "--launcher contradicts --tp"),
    (f"{GRID} {RAY} --slots 0", "--slots must be a whole number from 1 to 10000"),
    # ffn activations
    ("activations gelo", "NAME: unknown activation 'gelo'; did you mean 'gelu'"),
    ("activations gelu,", "NAME: unknown activation ''"),
    ("activations gelu --all", "--all contradicts NAME"),
    ("activations --at 3:-3", "--at: the range '3:-3' is empty"),
    ("activations --at 0:1:1e-12", "more than 10,000 points"),
    ("activations --at inf", "not a finite number"),
    ("activations --std 0", "--std must be a number above 0, got '0'"),
    ("activations --std 1e7", "--std must be from 1e-06 to 1e+06"),
    ("activations --expect 1", "--expect: '1' is not X=Y"),
    ("activations silu --against gelo", "error: --against: unknown activation 'gelo'; did you mean 'gelu'"),
    (
        "activations silu --against swiglu",
        "swiglu is a gated unit, a function of two inputs; name gated units",
    ),
    ("activations silu --against swiglu_oia", "--against: unknown activation 'swiglu_oia'; did you mean 'swiglu_oai'"),
    ("activations silu swiglu --against gelu", "error: --against gelu is a function of one number, unlike gated units"),
    (
        "activations silu geglu --rounding",
        "is for functions of one number, not gated units; leave out geglu",
    ),
    ("activations silu --against ''", "error: --against: unknown activation ''"),
    ("activations silu --against gelu --dtype bf17", "error: --dtype: unknown dtype 'bf17'; did you mean"),
    ("activations silu --against gelu --dtype fp64", "error: --dtype fp64 is the reference"),
    ("activations silu --against gelu --dtype ''", "error: --dtype: unknown dtype ''"),
    ("activations silu --dtype bf16", "error: --dtype needs --against, --rounding or --source"),
    ("activations silu --tolerance 1", "error: --tolerance needs --against"),
    ("activations silu --against gelu --tolerance -1", "error: --tolerance must be a number from 0, got '-1'"),
    ("activations silu --against gelu --tolerance nan", "error: --tolerance must be a number from 0, got 'nan'"),
    ("activations silu --device cuda", "error: --device needs --source or --rounding"),
    ("activations silu --rounding --device tpu", "error: --device: unknown device 'tpu'; use cpu, cuda or cuda:1"),
    (3, "activations silu --rounding --device cuda:99", "error: --device cuda:99: there "),
    ("activations swiglo", "NAME: unknown activation 'swiglo'", "did you mean 'swiglu'"),
    ("activations silu --iso-params", "--iso-params needs a gated unit", "swiglu_oai"),
    ("activations --iso-params", "--iso-params needs a gated unit"),
    ("activations swiglu --d-ff 4x", "--d-ff needs --iso-params"),
    ("activations swiglu --d-model 8", "--d-model needs --iso-params"),
    ("activations swiglu --multiple-of 8", "--multiple-of needs --iso-params"),
    ("activations swiglu --iso-params --d-model 0", "--d-model must be a whole number from 1"),
    ("activations swiglu --iso-params --d-model x", "--d-model must be a whole number"),
    ("activations swiglu --iso-params --d-ff 1000000000000", "--d-ff must be a whole number from 1"),
    ("activations swiglu --iso-params --multiple-of 0", "--multiple-of"),
    ("activations silu --up 1", "--up needs a gated unit"),
    ("activations swiglu --up nan", "--up: 'nan' is not a finite number"),
    ("activations swiglu --up ''", "--up"),
    ("activations swiglu --at 0:10:0.01 --up 0:10:1", "--up: 1,001 points at 11 values of up", "10,000"),
    ("activations swiglu --std 1e7", "--std must be from"),
    ("activations silu swiglu --expect 1=2", "--expect is for functions of one number", "leave out swiglu"),
    ("activations gelu --plot-file curves.txt", ".svg, .png, .pdf"),
    ("activations gelu --plot-file -", ".svg, .png, .pdf"),
    ("activations gelu --plot-file ''", ".svg, .png, .pdf"),
    (3, "activations gelu --plot-file no/such/place/curves.svg", "there is no directory"),
    ("activations gelu --plot-file same.svg -o ./same.svg", "cannot write .svg files"),
    # ffn plan
    ("plan llama-2-7b --device h1000", "did you mean"),
    ("plan llama-2-7b --device cpu", "needs --measured FILE"),
    ("plan llama-2-7b --tp 0", "--tp"),
    ("plan llama-2-7b --tp 3", "nearest: 2 and 4"),
    ("plan llama-2-7b --dtype f23", "unknown dtype"),
    ("plan llama-2-7b --skew zipf", "zipf:1.2"),
    ("plan llama-2-7b --ep 8", "has no experts"),
    ("plan llama-2-7b --link nv", "unknown link"),
    ("plan llama-2-7b --gemm-efficiency 1.5", "at most 1"),
    ("plan llama-2-7b --measured nowhere.csv", "nowhere.csv"),
    ("plan llama-2-7b --skew zipf:1", "--skew needs a mixture of experts"),
    # ffn doctor
    ("doctor --no-noise --seconds 3", "--seconds contradicts --no-noise"),
    ("doctor --no-noise --threads 3", "--threads contradicts --no-noise"),
    ("doctor --seconds 0", "--seconds must be a number above 0"),
    ("doctor --seconds nan", "--seconds must be a number above 0"),
    # ffn trace --example, --vocab
    ("trace --example notbook", "did you mean 'notebook'? (notebook, explained, llama, conv, bert)"),
    ("trace --example ''", "use one of notebook, explained, llama, conv, bert"),
    ("trace --example bert gpt2", "--example contradicts SOURCE"),
    ("trace --example bert --d-ff 8", "contradicts --d-ff"),
    ("trace --example bert --plain", "contradicts --plain"),
    ("trace --example bert --no-bias", "contradicts --no-bias"),
    ("trace --example bert --dtype bf16", "contradicts --dtype bf16"),
    ("trace --example bert --dtype nothing", "unknown dtype"),
    ("trace --example bert --input ones", "contradicts --input"),
    ("trace --example bert --vocab 8", "contradicts --vocab"),
    ("trace --example notebook --seed 1", "contradicts --seed"),
    ("trace --example notebook --seq-len 1", "contradicts --seq-len"),
    ("trace --example notebook --train", "contradicts --train"),
    ("trace 4x8 --sample-top-k 2", "--sample-top-k needs --vocab"),
    ("trace 4x8 --sample-top-p 0.5", "--sample-top-p needs --vocab"),
    ("trace 4x8 --vocab 3 --sample-top-k 4", "exceeds the vocabulary of 3"),
    ("trace 4x8 --vocab 3 --sample-top-p nan", "must be a number above 0 and at most 1"),
    ("trace 4x8 --vocab 3 --sample-top-p 0", "must be a number above 0 and at most 1"),
    ("trace 4x8 --vocab x", "--vocab must be a whole number"),
    ("trace --d-model 4x --vocab 3", "--d-model must be a whole number"),
    ("trace --device cuda:00", "error: --device: unknown device 'cuda:00'"),
    ("trace --device cuda:", "error: --device: unknown device 'cuda:'"),
    ("trace --device cpu:0", "error: --device: unknown device 'cpu:0'"),
    ("trace --device gpu", "error: --device: unknown device 'gpu'"),
    (
        "trace deepseek-v3 --d-model 8 --d-ff 16 --layer 0 --expert 3",
        "this layer of deepseek-v3 has no experts; the first MoE layer is 3\n",
    ),
    # ffn compare
    ("compare . .", "is not a file"),
    ("compare gelu", "NEW is missing"),
    ("compare gelu nothing", "'gelu' does not exist"),
    ("compare gelu silu", "did you mean `ffn activations gelu silu`?"),
    ("compare x.npz silu", "'x.npz' does not exist"),
    # ffn explain
    ("explain gleu", "unknown topic"),
    ("explain ''", "unknown topic"),
    (f"explain {5000 * 'x'}", "unknown topic"),
    ("explain '\x1b[2J'", "unknown topic"),
    ("gelu", "No such command 'gelu'; to read about it: ffn explain gelu"),
    ("neuron", "No such command 'neuron'; to read about it: ffn explain neuron"),
    ("SwiGLU", "No such command 'SwiGLU'; to read about it: ffn explain SwiGLU"),
    ("explian", "did you mean 'explain'"),
    # ffn merge
    (
        "bench 8x16:swiglu --tokens 1,2,3 --threads 1 --device cpu --shard 0/8",
        "--shard: 0/8: the first number must be from 1 to 8",
    ),
    (
        "bench 8x16:swiglu --tokens 1,2,3 --threads 1 --device cpu --shard 9/8",
        "--shard: 9/8: the first number must be from 1 to 8",
    ),
    ("bench 8x16 --selftest --shard 1/2", "--selftest contradicts --shard; it has its own kernels"),
    ("merge a.csv", "--output is missing; name the merged result: --output all.csv"),
    ("merge -o all.csv", "Missing argument 'FILE.csv'"),
    ("merge none.csv -o all.csv", "cannot read none.csv"),
    ("merge none.csv -o all.json", "all.json must end in .csv"),
    # values
    *(
        (f"params gpt2 --ridge={value}", "--ridge must be a number above 0", repr(value))
        for value in "0 -1 nan inf".split()
    ),
    ("params gpt2 --ridge=", "--ridge must be a number above 0", "''"),
    *((f"params gpt2 --dtype '{dtype}'", "--dtype: unknown dtype", repr(dtype)) for dtype in NO_DTYPES),
    *((f"trace 64x64 --dtype {dtype}", dtype, "counts bytes only") for dtype in ("int4", "q4_0", "mxfp4")),
    *(
        (f"trace --save '{name}'", "must end in one of .safetensors, .npz, .json")
        for name in "t.txt t t.pt t.NPZ".split()
    ),
    ("trace --save ''", "must end in one of .safetensors, .npz, .json"),
    *((f"params -- {source}",) for source in "-4x8:relu 4x-8:relu 4xabc:relu 4x:relu x8 4x8x16 x 4x 1:2".split()),
    *((f"params {value}x8:relu", "model", value[:31]) for value in NO_WIDTHS),
    *((f"params 8x{value}:relu", "ff", value[:31]) for value in NO_WIDTHS),
    *((f"params --d-model 4 --d-ff={n}x", "--d-ff") for n in ("0", "2.3", "-4", "", "4x", HUGE, "9999999999", "1e3")),
    *((f"params gpt2 --tensor-parallel '{value}'", "--tp", value[:30]) for value in NO_RANKS),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: " ".join(map(str, row[:2]))[:60])
def test_a_command_line_that_is_refused(row, call, tmp_path, monkeypatch):
    code, line, *parts = row if isinstance(row[0], int) else (2, *row)
    monkeypatch.chdir(tmp_path)
    assert len(expect_refusal(call(*shlex.split(line)), *parts, code=code)) < 800
    assert list(tmp_path.iterdir()) == []


VALUES = [  # (the command line up to an option's value, the name of that option in the error, values that are refused)
    ("params --d-model", "--d-model", NO_SIZES),
    ("params gpt2 --d-model", "--d-model", NO_SIZES),
    ("params --d-model 4 --d-ff", "--d-ff", NO_SIZES),
    ("params gpt2 --d-ff", "--d-ff", NO_SIZES),
    ("params gpt2 --tp", "--tp", NO_RANKS),
    ("params gpt2 --tokens", "--tokens", ["0", "1,0", "1,", ",", "", "x", "1,x", "-1", "1.5", LONG]),
    *(
        (f"trace 4x8 {name}", name, NO_SIZES)
        for name in "--tokens --batch --seq-len --threads --experts --top-k".split()
    ),
    *(
        (f"trace 4x8 --experts 2 {name}", name, NO_NATURALS)
        for name in "--seed --digits --show --shared-experts".split()
    ),
    ("trace 4x8 --experts 2 --expert", "--expert", ["x", "-1", "", "0,", "1.5", "³", LONG]),
    ("trace 4x8 --dropout", "--dropout", ["1", "-0.1", "nan", "inf", "x", "", "0,1"]),
    ("trace 4x8 --layer", "--layer", ["1", "-1", "x", "", "decoder.0", LONG]),
    ("compare a b --tolerance", "--tolerance must be a number from 0", ["-1", "nan", "inf", "x", ""]),
]


@pytest.mark.parametrize(
    ("line", "said", "value"),
    [(line, said, value) for line, said, values in VALUES for value in values],
    ids=lambda text: repr(text)[:40],
)
def test_a_value_that_is_refused(line, said, value, call):
    expect_refusal(call(*line.split(), value), said, value[:30])
