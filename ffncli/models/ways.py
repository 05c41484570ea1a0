"""What the matrices of FFNs are called, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """The names that one kind of FFN gives its matrices; `up` may hold the gate too where `gate` is empty."""

    up: str
    down: str
    gate: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (self.gate, self.up, self.down) if self.gate else (self.up, self.down)


WAYS: Sequence[Way] = (
    Way("up_proj", "down_proj", "gate_proj"),  # Llama and most others
    Way("up_proj", "down_proj", "linear_gate"),
    Way("w3", "w2", "w1"),  # Meta's and Mistral's own files, Mixtral, LFM2
    Way("v1", "w2", "w1"),  # DBRX
    Way("wi_1", "wo", "wi_0"),  # T5 v1.1
    Way("w_in.w_1", "w_out", "w_in.w_0"),  # CPM-Ant
    Way("w1", "c_proj", "w2"),  # Qwen v1: w2 is the gate
    Way("fc11", "fc2", "fc12"),  # Nomic BERT
    Way("proj_up", "proj_down", "proj_up_gate"),  # xLSTM
    Way("ffn_up", "ffn_down", "ffn_gate"),  # GGUF
    Way("ffn_up_exps", "ffn_down_exps", "ffn_gate_exps"),
    Way("ffn_up_shexp", "ffn_down_shexp", "ffn_gate_shexp"),
    Way("up_proj", "down_proj"),  # Nemotron, Arcee, Apertus
    Way("gate_up_proj", "down_proj"),  # Phi-3, GLM, 3-D experts
    Way("up_gate_proj", "down_proj"),  # GTE
    Way("Wi", "Wo"),  # ModernBERT
    Way("input_linear", "output_linear"),  # Granite's MoE, JetMoE
    Way("ff_proj", "ff_out"),  # Molmo
    Way("w13_weight", "w2_weight"),
    Way("mlp1_weight", "mlp2_weight"),  # OpenAI's own gpt-oss files
    Way("fc1", "fc2"),  # OPT, Whisper, BART, CLIP
    Way("c_fc", "c_proj"),  # GPT-2
    Way("dense_h_to_4h", "dense_4h_to_h"),  # BLOOM, GPT-NeoX, Falcon
    Way("fc_in", "fc_out"),  # GPT-J
    Way("wi", "wo"),  # T5
    Way("lin1", "lin2"),  # DistilBERT, XLM
    Way("linear1", "linear2"),  # torch's own TransformerEncoderLayer
    Way("linear_1", "linear_2"),  # Funnel
    Way("layer_1", "layer_2"),  # XLNet
    Way("intermediate.dense", "output.dense"),  # BERT
    Way("intermediate_dense", "output_dense"),  # wav2vec 2.0
    Way("dense.dense", "output.dense"),  # Reformer
    Way("intermediate", "output"),  # ProphetNet
    Way("ffn", "ffn_output"),  # ALBERT
    Way("ffn.0", "ffn.2"),  # CTRL
    Way("dense1", "dense2"),  # Perceiver
    Way("ffn_up", "ffn_down"),
)
DOWNS = {way.down: [w for w in WAYS if w.down == way.down] for way in WAYS}


def looked_for() -> str:
    """The names that the table has, for a message that nothing was found."""
    return ", ".join("/".join(way.names) for way in WAYS[:6]) + ", ..."
