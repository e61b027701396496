"""The sizes of a backbone, and what the paper leaves open about it."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_sv.errors import ConfigError, unknown

BALANCES = ("loss", "bias", "none")
#: the product of three widths, in bytes, still fits 64 bits: what is larger is a slip of the keyboard
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1 << 12


@dataclass(frozen=True)
class RouterConfig:
    """How a mixture of experts chooses and is kept balanced: our choice, for the paper does not state it.

    Qwen-MoE, whose widths the paper follows, does not renormalize, gates its shared expert, and has 0.001 for a balance
    loss that is k times ours.

    Attributes:
        renormalize: divide the chosen softmax probabilities by their sum
        balance: 'loss': an auxiliary loss (Switch Transformer, arXiv:2101.03961, eq. 4); 'bias':
            loss-free, a bias on the choice moved after every step (arXiv:2408.15664); 'none'
        balance_coef: weight of the auxiliary loss, which is 1 when balanced; 0.01 is the Switch Transformer's
        bias_rate: step of the bias
        z_coef: weight of the router z-loss, the mean squared log-sum-exp of the router's logits
            (ST-MoE, arXiv:2202.08906, eq. 5)
        gate_shared: weigh the shared expert by a sigmoid of a linear map, as Qwen2-MoE does
    """

    renormalize: bool = True
    balance: str = "loss"
    balance_coef: float = 0.01
    bias_rate: float = 1e-3
    z_coef: float = 0.0
    gate_shared: bool = False

    def __post_init__(self) -> None:
        where = "model.backbone.router"
        if self.balance not in BALANCES:
            raise ConfigError(unknown(f"{where}.balance", self.balance, BALANCES))
        for key in ("balance_coef", "bias_rate", "z_coef"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ConfigError(f"{where}.{key} is {getattr(self, key)}; it must be finite and not negative.")


@dataclass(frozen=True)
class RopeScalingConfig:
    """Llama 3.1's slower rotation of the slow channels, for contexts longer than those it was trained on.

    Attributes:
        factor: divides the frequencies of channels that turn less than low_freq_factor times in original_context
        low_freq_factor: turns below which a frequency is divided by factor
        high_freq_factor: turns above which a frequency is kept; between the two, it is interpolated
        original_context: tokens before the extension
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        where = "model.backbone.rope_scaling"
        for key in ("factor", "low_freq_factor", "original_context"):
            if not 0 < getattr(self, key) <= 1e12:
                raise ConfigError(f"{where}.{key} is {getattr(self, key)}; it must be positive, and at most 1e12.")
        if not self.low_freq_factor < self.high_freq_factor <= 1e12:
            raise ConfigError(
                f"{where}.high_freq_factor is {self.high_freq_factor}; it must be larger than low_freq_factor "
                f"{self.low_freq_factor}, and at most 1e12."
            )


@dataclass(frozen=True)
class BackboneConfig:
    """A Pre-Norm Llama: RoPE, SwiGLU, RMSNorm, no biases, untied embeddings.

    Gemma's norms are `qk_norm` and `post_norm`; LlamaMoE is `n_expert` and its companions. The
    defaults of what is not a size are readings of the paper (docs/readings.md).

    Attributes:
        name: the model's name in runs, figures and the table of tuned learning rates
        d_model: width of the residual stream
        n_layer: number of blocks
        n_head: number of attention heads
        vocab_size: rows of the embedding and of the lm_head, padding included
        d_head: width of a head; null for d_model / n_head
        n_kv_head: heads of keys and values, each shared by n_head / n_kv_head queries; null for n_head
        d_ff: hidden width of the SwiGLU, and of a shared expert; null for int(8 d_model / 3)
        qk_norm: normalize q and k over the head width, one scale vector for all heads (Gemma 3)
        post_norm: normalize what attention and FFN add to the residual stream (Gemma 3)
        n_expert: sparse experts a block; 0 for a dense FFN
        n_expert_active: experts that a token visits
        n_expert_shared: 0, or 1 for an expert of width d_ff that every token visits
        d_expert: hidden width of a sparse expert; null for int(2 d_model / 3)
        router: choice and balance of the experts
        rope_theta: base of the rotary frequencies
        rope_scaling: change of these frequencies as in Llama 3.1; null for none
        norm_eps: added to the mean square in every norm
        init_std: standard deviation of the normal initialization of every matrix
        init_std_by_role: standard deviation of a role of matrices, e.g. {embedding: 0.006, head: 0.01}; the roles are
            matrix, router, head and embedding, and a role that is not listed has init_std
        init_residual_scaling: divide the std of o_proj and down_proj by sqrt(2 n_layer)
    """

    d_model: int
    n_layer: int
    n_head: int
    vocab_size: int = 50_304
    name: str = "custom"
    d_head: int | None = None
    n_kv_head: int | None = None
    d_ff: int | None = None
    qk_norm: bool = False
    post_norm: bool = False
    n_expert: int = 0
    n_expert_active: int = 4
    n_expert_shared: int = 1
    d_expert: int | None = None
    router: RouterConfig = field(default_factory=RouterConfig)
    rope_theta: float = 10_000.0
    rope_scaling: RopeScalingConfig | None = None
    norm_eps: float = 1e-5
    init_std: float = 0.02
    init_std_by_role: dict[str, float] = field(default_factory=dict)
    init_residual_scaling: bool = True

    def __post_init__(self) -> None:
        where = "model.backbone"
        if isinstance(self.router, dict):  # a checkpoint holds plain values
            object.__setattr__(self, "router", RouterConfig(**self.router))
        if not isinstance(self.rope_scaling, RopeScalingConfig | None):
            object.__setattr__(self, "rope_scaling", RopeScalingConfig(**self.rope_scaling))
        sizes = ("d_model", "n_layer", "n_head", "n_kv_head", "vocab_size", "d_head", "d_ff", "d_expert")
        for key in (*sizes, "n_expert_active"):
            value = getattr(self, key)
            limit = MAX_LAYERS if key == "n_layer" else MAX_WIDTH
            if value is not None and not 1 <= value <= limit:
                raise ConfigError(f"{where}.{key} is {value}; it must be at least 1, and at most {limit:,}.")
        if self.d_head is None and self.d_model % self.n_head:
            raise ConfigError(
                f"{where}.d_model {self.d_model} is not divisible by n_head {self.n_head}; "
                "change one of them or set d_head."
            )
        if self.n_head % self.kv_heads:
            raise ConfigError(f"{where}.n_kv_head is {self.n_kv_head}; it must divide n_head {self.n_head}.")
        if self.head_width % 2:
            raise ConfigError(f"{where}: the head width {self.head_width} is odd; RoPE needs an even one.")
        for key in ("init_std", "norm_eps", "rope_theta"):
            if not 0 < getattr(self, key) <= 1e12:  # an integer of more than 64 bits is no number for torch
                raise ConfigError(f"{where}.{key} is {getattr(self, key)}; it must be positive, and at most 1e12.")
        roles = ("matrix", "router", "head", "embedding") if self.n_expert else ("matrix", "head", "embedding")
        for role, std in self.init_std_by_role.items():
            if role not in roles:
                raise ConfigError(unknown(f"role in {where}.init_std_by_role", role, roles))
            if not 0 <= std <= 1e12:
                raise ConfigError(f"{where}.init_std_by_role.{role} is {std}; expected a number from 0 to 1e12.")
        if not self.n_expert and self.router != RouterConfig():
            raise ConfigError(f"{where}.router is set, but n_expert is 0 and nothing is routed; set n_expert.")
        if self.n_expert and self.n_expert_active == 1 and self.router.renormalize:
            raise ConfigError(
                f"{where}.n_expert_active is 1: its weight divided by itself is 1, and the router would learn nothing "
                "from the loss; set router.renormalize to false."
            )
        if self.router.gate_shared and not self.n_expert_shared:
            raise ConfigError(f"{where}.router.gate_shared needs a shared expert; set n_expert_shared to 1.")
        if not 0 <= self.n_expert <= MAX_WIDTH or 0 < self.n_expert <= self.n_expert_active:
            raise ConfigError(
                f"{where}.n_expert is {self.n_expert}, with n_expert_active {self.n_expert_active}; it must be larger "
                "than that, or 0 for a dense FFN."
            )
        if self.n_expert_shared not in (0, 1):
            raise ConfigError(
                f"{where}.n_expert_shared is {self.n_expert_shared}; it must be 0 or 1 (d_ff is its width)."
            )

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.d_head or self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.n_kv_head or self.n_head

    @property
    def ffn_width(self) -> int:
        """Hidden width of the dense feed-forward network, and of a shared expert."""
        return self.d_ff or int(8 * self.d_model / 3)

    @property
    def expert_width(self) -> int:
        """Hidden width of one sparse expert."""
        return self.d_expert or int(2 * self.d_model / 3)

    def settings(self) -> dict[str, Any]:
        """Return the fields as plain values, without unset ones that earlier checkpoints do not have."""
        unset: dict[str, Any] = {"n_kv_head": None, "rope_scaling": None, "init_std_by_role": {}}
        return {k: v for k, v in asdict(self).items() if k not in unset or v != unset[k]}
