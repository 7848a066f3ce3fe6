"""The model card: what a plan needs to know of a model, as plain numbers. Importable without torch.

    skeleton.py  a Hugging Face config -> a skeleton on the meta device -> exact counts by role       (needs transformers)
    stated()     a few published figures (parameters, active, layers, ...) -> a card that fits them    (needs nothing)

Counts are parameters, widths are elements a token; bytes come in with the types that the plan chooses. Blocks that are
equal are stored once with their count, so a card of any depth is a handful of numbers. What was assumed is on the card.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trainer.errors import ConfigError

ROLES = ("attention", "dense_mlp", "shared_experts", "experts", "router", "norms", "other")


@dataclass(frozen=True)
class Linear:
    """Linear layers of one name and shape: what an adapter can be put on."""

    name: str  # last parts of the module's name, e.g. "self_attn.q_proj"
    d_in: int
    d_out: int
    count: int


@dataclass(frozen=True)
class Block:
    """Decoder blocks that are alike. Parameter counts are those of one block."""

    count: int
    attention: int
    norms: int
    dense_mlp: int = 0
    shared_experts: int = 0
    experts: int = 0  # all of them, idle ones included
    router: int = 0
    other: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    largest_tensor: int = 0
    heads: int = 0
    query_width: int = 0  # heads x head size of queries
    key_width: int = 0  # of keys as attention sees them
    value_width: int = 0
    output_width: int = 0  # heads x value head size
    latent_width: int = 0  # MLA: query and key-value latents
    mlp_width: int = 0  # intermediate size of the dense MLP, or of the shared experts together
    expert_width: int = 0  # of one routed expert
    gated: bool = True  # gate and up projections beside down
    hidden_norms: int = 2  # norms over the hidden size
    head_norms: bool = False  # queries and keys are normalised
    kv_elements: int = 0  # cached per token: keys and values, or the latent
    window: int | None = None  # a token attends to this many positions at most; the engine caches no more
    eager: bool = False  # attention keeps its scores: the architecture has no fused form
    softmax: bool = True  # False: a linear-attention or state-space block, which keeps no keys and values

    @property
    def parameters(self) -> int:
        return self.attention + self.norms + self.dense_mlp + self.shared_experts + self.experts + self.router + self.other

    @property
    def active_parameters(self) -> int:
        idle = self.experts - self.experts * self.experts_per_token // self.num_experts if self.num_experts else 0
        return self.parameters - idle


@dataclass(frozen=True)
class ModelCard:
    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    embedding: int  # parameters of the input embedding
    head: int  # parameters of the output head; 0 where it is the embedding
    final: int  # what stands outside blocks, embedding and head: the last norm, learned positions
    blocks: tuple[Block, ...]
    linears: tuple[Linear, ...] = ()
    assumptions: tuple[str, ...] = ()
    max_positions: int | None = None
    source: Mapping[str, object] = field(default_factory=dict, compare=False)  # the resolved config, where there is one

    @property
    def num_layers(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def parameters(self) -> int:
        return self.embedding + self.head + self.final + sum(block.count * block.parameters for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes: all but the experts that its routers leave out."""
        return self.embedding + self.head + self.final + sum(block.count * block.active_parameters for block in self.blocks)

    @property
    def multiplied_parameters(self) -> int:
        """Active parameters that take part in a matrix product: without the embedding's look-up, with the head even if tied."""
        looked_up = self.embedding if self.head else 0
        return self.active_parameters - looked_up

    @property
    def is_moe(self) -> bool:
        return any(block.num_experts for block in self.blocks)

    @property
    def largest_block(self) -> int:
        return max(block.parameters for block in self.blocks)

    @property
    def largest_tensor(self) -> int:
        return max(self.embedding, self.head, *(block.largest_tensor for block in self.blocks))

    def gathered_unit(self, expert_parallel: int = 1) -> int:
        """Return the parameters of the largest unit (a block, the embedding, the head) that is gathered.

        A layer's experts, spread over some devices, never are.
        """
        blocks = (block.parameters - block.experts + block.experts // expert_parallel for block in self.blocks)
        return max(self.embedding, self.head, *blocks)

    def gathered_block(self, expert_parallel: int = 1) -> int:
        """Return the largest block as one device sees it, experts spread."""
        return max(block.parameters - block.experts + block.experts // expert_parallel for block in self.blocks)

    def gathered_tensor(self, expert_parallel: int = 1) -> int:
        """Return the largest tensor as one device sees it; a layer's experts are one or two stacked tensors."""
        blocks = (b.largest_tensor // (expert_parallel if b.experts else 1) for b in self.blocks)
        return max(self.embedding, self.head, *blocks)

    def role(self, name: str) -> int:
        """Return the parameters of a role over the whole model."""
        if name in ("embedding", "head", "final"):
            return int(getattr(self, name))
        return sum(block.count * int(getattr(block, name)) for block in self.blocks)

    def by_role(self) -> dict[str, int]:
        """Return parameters by role; the sum is `parameters`."""
        counts = {"embedding": self.embedding} | {name: self.role(name) for name in ROLES} | {"head": self.head}
        counts["norms"] += self.final
        return {name: count for name, count in counts.items() if count or name in ("embedding", "attention", "norms")}

    # -- keys and values ----------------------------------------------------------------------------------------------

    def kv_bytes_per_token(self, bits: int = 16) -> float:
        """Return cached bytes of one more token below every window: sum over layers of cached elements x bits / 8."""
        return sum(block.count * block.kv_elements for block in self.blocks) * bits / 8

    def kv_bytes(self, tokens: int, bits: int = 16, page: int = 1, windows: bool = True) -> float:
        """Return cached bytes of one sequence.

        Args:
            tokens: length of the sequence.
            bits: of one cached element.
            page: tokens of a page; lengths round up to it.
            windows: whether the cache drops what lies outside a sliding window.
        """
        total = 0
        for block in self.blocks:
            kept = min(tokens, block.window) if windows and block.window else tokens
            total += block.count * block.kv_elements * -(-kept // page) * page
        return total * bits / 8

    # -- work -----------------------------------------------------------------------------------------------------------

    def forward_flops(self, tokens: float, context: float = 0) -> float:
        """Return floating-point operations of a forward pass: 2 per multiplied parameter and token, plus attention.

        Args:
            tokens: tokens fed.
            context: mean number of positions that a token attends to.
        """
        attention = 0.0
        for block in (b for b in self.blocks if b.softmax):
            seen = min(context, block.window) if block.window else context
            attention += block.count * 2 * seen * (block.query_width + block.output_width)
        return tokens * (2 * self.multiplied_parameters + attention)

    # -- adapters -------------------------------------------------------------------------------------------------------

    def targeted(self, targets: Iterable[str]) -> list[Linear]:
        """Return the linear layers that target names choose, as peft matches them: the whole name or its last parts."""
        wanted = tuple(targets)
        return [one for one in self.linears if any(one.name == t or one.name.endswith("." + t) for t in wanted)]

    def lora_parameters(self, rank: int, targets: Iterable[str]) -> int:
        """Return the parameters of a LoRA adapter: sum of rank x (d_in + d_out) over its layers (Hu et al. 2021)."""
        return sum(one.count * rank * (one.d_in + one.d_out) for one in self.targeted(targets))

    def named(self, name: str) -> ModelCard:
        return replace(self, name=name)


def stated(
    name: str,
    *,
    parameters: float,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    active_parameters: float | None = None,
    num_experts: int = 0,
    experts_per_token: int = 0,
    num_heads: int = 0,
    num_kv_heads: int = 0,
    head_dim: int = 128,
    kv_lora_rank: int = 0,
    rope_dim: int = 64,
    tied: bool = False,
    max_positions: int | None = None,
) -> ModelCard:
    """Return a card that has the stated totals, for a model whose config nobody has.

    Embedding and head take vocab_size x hidden_size each, attention its projections, and the MLP whatever is left. With
    active parameters A < P the experts hold (P - A) / (1 - experts_per_token / num_experts).
    """
    total, layers = round(parameters), num_layers
    heads = num_heads or max(1, hidden_size // head_dim)
    kv_heads = num_kv_heads or heads
    query, kv = heads * head_dim, kv_heads * head_dim
    embedding = vocab_size * hidden_size
    head = 0 if tied else embedding
    attention = hidden_size * (2 * query + 2 * kv)
    norms = 2 * hidden_size
    assumed = [f"{name}: planned from stated figures, not from a config; the MLP takes what embedding and attention leave"]
    per_block, left_over = divmod(total - embedding - head - hidden_size, layers)
    mlp = per_block - attention - norms
    if mlp <= 0:
        raise ConfigError(
            "model.parameters", parameters, f"{layers} layers of {hidden_size} need at least {layers * (attention + norms):,}"
        )
    experts, expert_width = 0, 0
    if active_parameters is not None and active_parameters < parameters:
        if not num_experts or not experts_per_token:
            num_experts, experts_per_token = 64, 4
            assumed.append(f"{name}: num_experts and experts_per_token not stated; {num_experts} and {experts_per_token} assumed")
        experts = round((parameters - active_parameters) / (1 - experts_per_token / num_experts) / layers)
        experts = min(experts // num_experts * num_experts, mlp)
        expert_width = max(1, experts // num_experts // (3 * hidden_size))
    dense = mlp - experts
    if not num_kv_heads and not kv_lora_rank:
        assumed.append(f"{name}: num_kv_heads not stated; as many as query heads ({heads} x {head_dim}) assumed for the KV cache")
    kv_elements = kv_lora_rank + rope_dim if kv_lora_rank else 2 * kv
    mlp_width = dense // (3 * hidden_size)
    biggest = max(experts * 2 // 3, hidden_size * max(mlp_width, query))
    block = Block(
        count=layers,
        attention=attention,
        norms=norms,
        dense_mlp=dense,
        experts=experts,
        num_experts=num_experts if experts else 0,
        experts_per_token=experts_per_token if experts else 0,
        largest_tensor=biggest,
        heads=heads,
        query_width=query,
        key_width=kv,
        value_width=kv,
        output_width=query,
        latent_width=2 * kv_lora_rank,
        mlp_width=mlp_width,
        expert_width=expert_width,
        kv_elements=kv_elements,
    )
    projections = (
        ("q_proj", hidden_size, query),
        ("k_proj", hidden_size, kv),
        ("v_proj", hidden_size, kv),
        ("o_proj", query, hidden_size),
    )
    mlp_linears = (
        ("gate_proj", hidden_size, mlp_width),
        ("up_proj", hidden_size, mlp_width),
        ("down_proj", mlp_width, hidden_size),
    )
    linears = [Linear(n, i, o, layers) for n, i, o in (*projections, *(mlp_linears if mlp_width else ()))]
    return ModelCard(
        name=name,
        architecture="stated",
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        embedding=embedding,
        head=head,
        final=hidden_size + left_over,
        blocks=(block,),
        linears=tuple(linears),
        assumptions=tuple(assumed),
        max_positions=max_positions,
        source={},
    )
