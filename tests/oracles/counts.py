"""Totals that others have published or that follow from a closed form: what the counts are held to.

Each row: FFN parameters per layer, of all layers, and active per token (all layers). Sources: the models' papers and
config files, as in the catalog; dense rows are d_model · d_ff · (2 or 3) plus biases, written out here by hand.
"""

DENSE = {
    "transformer-base": (2_099_712, 25_196_544),
    "transformer-big": (8_393_728, 100_724_736),
    "bert-base": (4_722_432, 56_669_184),
    "bert-large": (8_393_728, 201_449_472),
    "gpt2": (4_722_432, 56_669_184),
    "gpt2-medium": (8_393_728, 201_449_472),
    "gpt2-large": (13_113_600, 472_089_600),
    "gpt2-xl": (20_488_000, 983_424_000),
    "gpt3-175b": (1_208_020_992, 115_970_015_232),
    "t5-v1.1-base": (4_718_592, 113_246_208),
    "t5-v1.1-xxl": (125_829_120, 6_039_797_760),
    "opt-125m": (4_722_432, 56_669_184),
    "opt-175b": (1_208_020_992, 115_970_015_232),
    "bloom-176b": (1_644_238_848, 115_096_719_360),
    "gpt-neox-20b": (302_020_608, 13_288_906_752),
    "pythia-12b": (209_740_800, 7_550_668_800),
    "palm-540b": (4_076_863_488, 481_069_891_584),
    "llama-2-7b": (135_266_304, 4_328_521_728),
    "llama-2-13b": (212_336_640, 8_493_465_600),
    "llama-65b": (541_065_216, 43_285_217_280),
    "llama-2-70b": (704_643_072, 56_371_445_760),
    "llama-3.1-8b": (176_160_768, 5_637_144_576),
    "llama-3.1-70b": (704_643_072, 56_371_445_760),
    "llama-3.1-405b": (2_617_245_696, 329_772_957_696),
    "mistral-7b": (176_160_768, 5_637_144_576),
    "mistral-7b-v0.3": (176_160_768, 5_637_144_576),
    "gemma-7b": (226_492_416, 6_341_787_648),
    "gemma-2-9b": (154_140_672, 6_473_908_224),
    "gemma-2-27b": (509_607_936, 23_441_965_056),
    "gemma-3-1b": (23_887_872, 621_084_672),
    "gemma-3-4b": (78_643_200, 2_673_868_800),
    "gemma-3-12b": (176_947_200, 8_493_465_600),
    "gemma-3-27b": (346_816_512, 21_502_623_744),
    "phi-2": (52_441_600, 1_678_131_200),
    "phi-3-mini": (75_497_472, 2_415_919_104),
    "phi-4": (275_251_200, 11_010_048_000),
    "qwen2.5-7b": (203_685_888, 5_703_204_864),
    "qwen2.5-72b": (726_663_168, 58_133_053_440),
    "qwen3-8b": (150_994_944, 5_435_817_984),
    "olmo-2-7b": (135_266_304, 4_328_521_728),
    "olmo-2-13b": (212_336_640, 8_493_465_600),
    "olmo-2-32b": (424_673_280, 27_179_089_920),
    "falcon-7b": (165_183_488, 5_285_871_616),
    "falcon-40b": (536_870_912, 32_212_254_720),
    "vit-b-16": (4_722_432, 56_669_184),
    "whisper-tiny": (1_181_568, 9_452_544),
    "whisper-large-v3": (13_113_600, 839_270_400),
}

# d_model, expert d_ff, experts, top_k, params of one routed expert, FFN total, FFN active per token
MOE = {
    "mixtral-8x7b": (4096, 14336, 8, 2, 176_160_768, 45_098_205_184, 11_275_337_728),
    "mixtral-8x22b": (6144, 16384, 8, 2, 301_989_888, 135_294_222_336, 33_825_619_968),
    "qwen3-30b-a3b": (2048, 768, 128, 8, 4_718_592, 29_003_612_160, 1_824_522_240),
    "qwen3-235b-a22b": (4096, 1536, 128, 8, 18_874_368, 227_145_678_848, 14_242_807_808),
    "deepseek-v2": (5120, 1536, 160, 6, 23_592_960, 225_738_588_160, 11_372_953_600),
    "deepseek-v3": (7168, 2048, 256, 8, 44_040_192, 657_758_632_448, 24_284_510_720),
    "gpt-oss-20b": (2880, 2880, 32, 4, 24_891_840, 19_119_145_728, 2_391_829_248),
    "gpt-oss-120b": (2880, 2880, 128, 4, 24_891_840, 114_714_874_368, 3_597_700_608),
}

# Parameters of the whole model. Each agrees with the published figure to as many digits as that has (GPT-3 175 B, PaLM
# 540.35 B, DeepSeek-V3 671 B). Tied weights once; BERT with its pooler, DeepSeek-V3 without its multi-token-prediction
# layer and with the router's choice correction.
WHOLE = {
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-xxl": 11_135_332_352,
    "opt-125m": 125_239_296,
    "bloom-176b": 176_247_271_424,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-12b": 11_846_072_320,
    "palm-540b": 540_356_474_880,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-65b": 65_285_660_672,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "falcon-7b": 6_921_720_704,
    "whisper-tiny": 37_760_640,
    "whisper-large-v3": 1_543_490_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}

# Active parameters per token, with the input embedding and without. Published: Mixtral 12.9 B and 39 B, Qwen3 3.3 B and
# 22 B, DeepSeek-V2 21 B and -V3 37 B (with); gpt-oss 3.6 B and 5.1 B (without).
ACTIVE = {
    "mixtral-8x7b": (12_879_925_248, 12_748_853_248),
    "mixtral-8x22b": (39_161_468_928, 38_960_142_336),
    "qwen3-30b-a3b": (3_353_032_704, 3_041_867_776),
    "qwen3-235b-a22b": (22_190_763_520, 21_568_433_664),
    "deepseek-v2": (21_375_800_320, 20_851_512_320),
    "deepseek-v3": (37_552_297_472, 36_625_618_432),
    "gpt-oss-20b": (4_187_440_704, 3_608_307_264),
    "gpt-oss-120b": (5_711_982_912, 5_132_849_472),
}

# Bytes of all tensors of the released files: the `total_size` of the model.safetensors.index.json on the Hub.
STORED_BYTES = {
    "llama-3.1-8b": 16_060_522_496,
    "mixtral-8x7b": 93_405_585_408,
    "gpt-oss-20b": 13_761_264_768,
}

# Bytes per FFN weight as released, by the dtype of the tensors in the files; none for those without any.
WIDTHS = {
    **dict.fromkeys(("bert-base", "bert-large", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "vit-b-16"), 4),
    **dict.fromkeys(("t5-v1.1-base", "t5-v1.1-xxl", "whisper-tiny", "gemma-2-9b", "gemma-2-27b"), 4),
    **dict.fromkeys(("olmo-2-7b", "olmo-2-13b", "olmo-2-32b"), 4),
    **dict.fromkeys(
        ("opt-125m", "opt-175b", "bloom-176b", "gpt-neox-20b", "pythia-12b", "llama-2-7b", "llama-2-13b"), 2
    ),
    **dict.fromkeys(("llama-65b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "mistral-7b"), 2),
    **dict.fromkeys(("mistral-7b-v0.3", "gemma-7b", "gemma-3-1b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b"), 2),
    **dict.fromkeys(("phi-2", "phi-3-mini", "phi-4", "qwen2.5-7b", "qwen2.5-72b", "qwen3-8b", "falcon-7b"), 2),
    **dict.fromkeys(("falcon-40b", "whisper-large-v3", "mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b"), 2),
    **dict.fromkeys(("qwen3-235b-a22b", "deepseek-v2"), 2),
    "deepseek-v3": 1,
    "gpt-oss-20b": 4.25 / 8,
    "gpt-oss-120b": 4.25 / 8,
}
