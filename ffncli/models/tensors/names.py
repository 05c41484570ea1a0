"""The names of FFN matrices, in one table."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.dataclass import dataclass


@dataclass(frozen=True)
class Naming:
    """The names that one kind of FFN gives its matrices; `up` may contain the gate too if `gate` is empty."""

    up: str
    down: str
    gate: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return (self.gate, self.up, self.down) if self.gate else (self.up, self.down)


def last(name: str) -> str:
    """The last component of a dotted name."""
    return name.rpartition(".")[2]


NAMINGS: Sequence[Naming] = (
    Naming("up_proj", "down_proj", "gate_proj"),  # Llama and most others
    Naming("up_proj", "down_proj", "linear_gate"),
    Naming("w3", "w2", "w1"),  # Meta's and Mistral's own files, Mixtral, LFM2
    Naming("v1", "w2", "w1"),  # DBRX
    Naming("wi_1", "wo", "wi_0"),  # T5 v1.1
    Naming("w_in.w_1", "w_out", "w_in.w_0"),  # CPM-Ant
    Naming("w1", "c_proj", "w2"),  # Qwen v1: w2 is the gate
    Naming("fc11", "fc2", "fc12"),  # Nomic BERT
    Naming("proj_up", "proj_down", "proj_up_gate"),  # xLSTM
    Naming("ffn_up", "ffn_down", "ffn_gate"),  # GGUF
    Naming("ffn_up_exps", "ffn_down_exps", "ffn_gate_exps"),
    Naming("ffn_up_shexp", "ffn_down_shexp", "ffn_gate_shexp"),
    Naming("up_proj", "down_proj"),  # Nemotron, Arcee, Apertus
    Naming("gate_up_proj", "down_proj"),  # Phi-3, GLM, 3-D experts
    Naming("up_gate_proj", "down_proj"),  # GTE
    Naming("Wi", "Wo"),  # ModernBERT
    Naming("input_linear", "output_linear"),  # Granite's MoE, JetMoE
    Naming("ff_proj", "ff_out"),  # Molmo
    Naming("w13_weight", "w2_weight"),  # Inkling's own files, these three
    Naming("shared_w13_weight", "shared_w2_weight"),
    Naming("w13_dn", "w2_md"),
    Naming("mlp1_weight", "mlp2_weight"),  # OpenAI's own gpt-oss files
    Naming("fc1.proj", "fc2"),  # CLVP
    Naming("fc1", "fc2"),  # OPT, Whisper, BART, CLIP
    Naming("c_fc", "c_proj"),  # GPT-2
    Naming("dense_h_to_4h", "dense_4h_to_h"),  # BLOOM, GPT-NeoX, Falcon
    Naming("fc_in", "fc_out"),  # GPT-J
    Naming("wi", "wo"),  # T5
    Naming("lin1", "lin2"),  # DistilBERT, XLM
    Naming("mlp.in_proj", "mlp.out_proj"),  # Bark; a Mamba mixer has these too
    Naming("linear1", "linear2"),  # torch's own TransformerEncoderLayer
    Naming("linear_1", "linear_2"),  # Funnel
    Naming("layer_1", "layer_2"),  # XLNet
    Naming("intermediate.dense", "output.dense"),  # BERT
    Naming("lang_inter.dense", "lang_output.dense"),  # LXMERT's layers of both streams
    Naming("intermediate_dense", "output_dense"),  # wav2vec 2.0
    Naming("dense.dense", "output.dense"),  # Reformer
    Naming("intermediate", "output"),  # ProphetNet
    Naming("ffn", "ffn_output"),  # ALBERT
    Naming("ffn.0", "ffn.2"),  # CTRL
    Naming("dense_in", "dense_out"),  # Cohere ASR
    Naming("dense1", "dense2"),  # Perceiver
    Naming("ffn_up", "ffn_down"),
)
_BY_DOWN = {naming.down: [n for n in NAMINGS if n.down == naming.down] for naming in NAMINGS}
# The last component of a name → the down projections that end in it, each with its namings.
BY_LAST = {leaf: [(d, n) for d, n in _BY_DOWN.items() if last(d) == leaf] for leaf in map(last, _BY_DOWN)}


def looked_for() -> str:
    """The first names of the table, for the error that no FFN is recognised."""
    return ", ".join("/".join(naming.names) for naming in NAMINGS[:6]) + ", ..."
