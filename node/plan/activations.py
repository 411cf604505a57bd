"""Bytes that the forward pass of the built-in model keeps for the backward pass, a token. Pure.

Counted as in Korthikanti et al. (arXiv 2205.05198, section 4): each operation keeps what its gradient needs, a tensor
that several operations keep counts once. Their block has LayerNorm, dropout, GELU and attention without FlashAttention;
this one has RMSNorm, rotary embeddings, grouped-query attention by FlashAttention (arXiv 2205.14135: the scores are not
kept) and SwiGLU (arXiv 2002.05202). Of a mixture of experts a token has rows in as many as it goes through.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.protocol.model_settings import ModelSettings

FP32_BYTES = 4
ROW_BYTES = 36
"""Of a token at an expert: its numbers in both orders, and its weight."""
SCORES = 4
"""Arrays of scores of queries and a block of keys that the backward pass of a ring has at once, in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """How operations are carried out, which says what they keep."""

    fuses_norms: bool
    """An RMSNorm keeps its input and one number a token; else its normed input too."""
    transposes: bool
    """The output of attention is copied to the layout of the matrix product after it."""


ON_GPU = Kernels(fuses_norms=True, transposes=False)
ON_CPU = Kernels(fuses_norms=False, transposes=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Of one rank."""

    model: ModelSettings
    precision: str
    """fp32, or bf16 for the matrix products and what is between them."""
    is_cast: bool = False
    """In bf16 FSDP2 casts the parameters, so that the residual stream and the norms are bf16 too; by autocast they are
    fp32."""
    tp: int = 1
    by_positions: bool = False
    """Sequence parallelism: `tp` divides norms and the residual stream too, but not what matrix products take, which
    is gathered once and kept."""
    kernels: Kernels = ON_GPU
    scored: int = 0
    """Keys of a block of a ring, where each query's scores of them are in memory: on GPUs (`parallel/blocks.py`)."""

    @property
    def itemsize(self) -> int:
        """Of what a matrix product takes and gives."""
        return 2 if self.precision == "bf16" else FP32_BYTES

    @property
    def stream_itemsize(self) -> int:
        """Of the residual stream."""
        return self.itemsize if self.is_cast else FP32_BYTES

    @property
    def stream_bytes(self) -> float:
        """Of the residual stream, a tensor of it."""
        return self._by_positions(self.stream_itemsize * self.model.dim)

    def block_bytes(self, checkpointing: str) -> float:
        """Of a block, from its forward pass until its backward pass begins."""
        model, size, tp = self.model, self.itemsize, self.tp
        if checkpointing == "full":  # the input
            return self.stream_bytes
        attention = self._attention_bytes
        if checkpointing == "selective":
            kv_dim = model.dim // model.num_heads * model.num_kv_heads
            of_pair = size * (model.dim + 2 * kv_dim + 2 * self._width) / tp  # q, k, v; gate, up
            given = 1 + bool(model.num_shared_experts) + self._num_rows if model.num_experts else 2
            outputs = given * size * model.dim  # of wo and down
            return self.stream_bytes + of_pair + attention + outputs + self._scores_bytes
        # What matrix products take; autocast makes a copy for each of five, or of three if experts alone follow.
        is_dense = not model.num_experts or model.num_shared_experts
        taken = 2 * size * model.dim if self.stream_itemsize == size else (5 if is_dense else 3) * size * model.dim
        qkv = 3 * size * model.dim / tp  # k and v repeated for each head of q
        copied = size * model.dim / tp if self.kernels.transposes else 0
        ffn = 4 * size * self._width / tp  # gate, its silu, up, the product
        return 2 * self._norm_bytes + taken + qkv + attention + copied + ffn + self._routed_bytes

    def again_bytes(self, checkpointing: str) -> float:
        """Of a block whose backward pass computes again what was not kept: as much as there is without
        checkpointing then, beside what was kept of it."""
        return self.block_bytes("none") - self.block_bytes(checkpointing)

    @property
    def head_bytes(self) -> float:
        """What the last norm and the head keep, without the logits."""
        return self._norm_bytes + self.itemsize * self.model.dim

    @property
    def logits_bytes(self) -> int:
        """Kept until the step is over, as the step's output."""
        return self.itemsize * self.model.vocab_size

    @property
    def loss_bytes(self) -> int:
        """At the loss, beside the logits: their log-softmax in fp32, its gradient and that of the logits."""
        return 3 * FP32_BYTES * self.model.vocab_size

    @property
    def passing_bytes(self) -> float:
        """In the backward pass of a block, beside what was kept: a gradient of the feed-forward's width and two of the
        model's, or the scores of a ring."""
        scores = SCORES * FP32_BYTES * self.model.num_heads / self.tp * self.scored
        return max(self.itemsize * (self._width / self.tp + 2 * self.model.dim), scores)

    @property
    def _num_rows(self) -> int:
        """Experts that a token goes through."""
        return self.model.experts_per_token if self.model.num_experts else 0

    @property
    def _width(self) -> int:
        """Of all feed-forwards that a token goes through."""
        return self.model.ffn_dim * (self._num_rows + self.model.num_shared_experts if self.model.num_experts else 1)

    @property
    def _routed_bytes(self) -> float:
        """What experts take and give, in their order and in that of tokens, and what the router takes in fp32."""
        if not self.model.num_experts:
            return 0
        copies = 2 if self.stream_itemsize == self.itemsize else 3  # autocast's own for each of two matrices
        rows = self._num_rows * (copies * self.itemsize * self.model.dim + ROW_BYTES)
        return rows + self._scores_bytes + FP32_BYTES * self.model.dim * (self.itemsize < FP32_BYTES)

    @property
    def _scores_bytes(self) -> int:
        """Of a router."""
        return FP32_BYTES * self.model.num_experts

    @property
    def _attention_bytes(self) -> float:
        """Its output, and a sum a head."""
        return (self.itemsize * self.model.dim + FP32_BYTES * self.model.num_heads) / self.tp

    @property
    def _norm_bytes(self) -> float:
        dim = self.model.dim
        kept = self.stream_itemsize * dim if self.kernels.fuses_norms else 2 * FP32_BYTES * dim
        return self._by_positions(FP32_BYTES + kept)

    def _by_positions(self, num_bytes: float) -> float:
        return num_bytes / (self.tp if self.by_positions else 1)
