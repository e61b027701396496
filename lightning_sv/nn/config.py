"""Sizes of a backbone, and choices that the paper leaves open."""

import math
from dataclasses import dataclass, field

from lightning_sv.errors import ConfigError, expect, expect_fields, expect_known, expect_types

BALANCES = ("loss", "bias", "none")
#: Upper bound on any width: larger values are typing errors, and a product of three such widths
#: fits in 64 bits.
MAX_WIDTH = 1 << 20
MAX_LAYERS = 1 << 12
PREFIX = "model.backbone"
SIZES = (
    "d_model", "n_layer", "n_head", "n_kv_head", "vocab_size", "d_head", "d_ff", "d_expert",
    "n_expert_active",
)  # fmt: skip


@dataclass(frozen=True)
class RouterConfig:
    """Routing and load balancing of a mixture of experts, which the paper does not specify.

    Qwen-MoE, whose widths the paper follows, does not renormalize, gates its shared expert, and
    uses a coefficient of 0.001 for a balance loss that is k times ours.

    Attributes:
        renormalize: divide the selected softmax probabilities by their sum
        balance: 'loss': an auxiliary loss (Switch Transformer, arXiv:2101.03961, eq. 4); 'bias':
            loss-free, a bias on the selection updated after every step (arXiv:2408.15664); 'none'
        balance_coef: weight of the auxiliary loss, which is 1 when balanced; the Switch Transformer
            uses 0.01
        bias_rate: step size of the bias
        z_coef: weight of the router z-loss, the mean squared log-sum-exp of the router's logits
            (ST-MoE, arXiv:2202.08906, eq. 5)
        gate_shared: multiply the shared expert's output by the sigmoid of a linear map, as in
            Qwen2-MoE
    """

    renormalize: bool = True
    balance: str = "loss"
    balance_coef: float = 0.01
    bias_rate: float = 1e-3
    z_coef: float = 0.0
    gate_shared: bool = False

    def __post_init__(self) -> None:
        prefix = f"{PREFIX}.router"
        expect_types(prefix, self)
        expect_known(f"{prefix}.balance", self.balance, BALANCES)
        for key in ("balance_coef", "bias_rate", "z_coef"):
            value = getattr(self, key)
            expect(
                0 <= value < math.inf, f"{prefix}.{key}", value, "a finite number of at least 0."
            )


@dataclass(frozen=True)
class RopeScalingConfig:
    """Llama 3.1's scaling of low RoPE frequencies, for contexts longer than in pre-training.

    Attributes:
        factor: divisor of the frequencies with fewer than low_freq_factor rotations in
            original_context
        low_freq_factor: number of rotations below which a frequency is divided by factor
        high_freq_factor: number of rotations above which a frequency is unchanged; interpolated in
            between
        original_context: context length before the extension, in tokens
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        prefix = f"{PREFIX}.rope_scaling"
        expect_types(prefix, self)
        for key in ("factor", "low_freq_factor", "original_context"):
            value = getattr(self, key)
            expect(0 < value <= 1e12, f"{prefix}.{key}", value, "a number above 0, at most 1e12.")
        low = self.low_freq_factor
        high = self.high_freq_factor
        expected = f"more than low_freq_factor {low}, and at most 1e12."
        expect(low < high <= 1e12, f"{prefix}.high_freq_factor", high, expected)


@dataclass(frozen=True)
class BackboneConfig:
    """A Pre-Norm Llama: RoPE, SwiGLU, RMSNorm, no biases, untied embeddings.

    Gemma's norms are `qk_norm` and `post_norm`; LlamaMoE uses `n_expert` and the options below it.
    Defaults other than sizes are interpretations of the paper (docs/readings.md).

    Attributes:
        name: name of the model in runs, figures and the table of tuned learning rates
        d_model: width of the residual stream
        n_layer: number of blocks
        n_head: number of attention heads
        vocab_size: rows of the embedding and of the lm_head, including padding
        d_head: width of a head; null for d_model / n_head
        n_kv_head: number of key and value heads, each shared by n_head / n_kv_head queries; null
            for n_head
        d_ff: hidden width of the SwiGLU and of a shared expert; null for int(8 d_model / 3)
        qk_norm: normalize q and k over the head width, with one scale vector for all heads (Gemma
            3)
        post_norm: normalize the outputs of attention and FFN (Gemma 3)
        n_expert: number of sparse experts per block; 0 for a dense FFN
        n_expert_active: number of experts per token
        n_expert_shared: 0, or 1 for an expert of width d_ff for all tokens
        d_expert: hidden width of a sparse expert; null for int(2 d_model / 3)
        router: routing and load balancing
        rope_theta: base of the rotary frequencies
        rope_scaling: scaling of these frequencies as in Llama 3.1; null for none
        norm_eps: added to the mean square in every norm
        init_std: standard deviation of the normal initialization of every matrix
        init_std_by_role: standard deviation per role, e.g. {embedding: 0.006, head: 0.01}; the
            roles are matrix, router, head and embedding, with init_std as the default
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
        for key, kind in (("router", RouterConfig), ("rope_scaling", RopeScalingConfig)):
            value = getattr(self, key)
            if isinstance(value, dict):  # checkpoints contain plain values
                expect_fields(kind, value)
                object.__setattr__(self, key, kind(**value))
        expect_types(PREFIX, self)
        self._check_sizes()
        self._check_heads()
        self._check_numbers()
        self._check_experts()

    def _check_sizes(self) -> None:
        for key in SIZES:
            value = getattr(self, key)
            limit = MAX_LAYERS if key == "n_layer" else MAX_WIDTH
            if value is not None:
                expect(1 <= value <= limit, f"{PREFIX}.{key}", value, f"1 to {limit:,}.")

    def _check_heads(self) -> None:
        if self.d_head is None:
            expected = f"a multiple of n_head {self.n_head}. Change one of them or set d_head."
            divides = self.d_model % self.n_head == 0
            expect(divides, f"{PREFIX}.d_model", self.d_model, expected)
        expected = f"a divisor of n_head {self.n_head}."
        expect(self.n_head % self.kv_heads == 0, f"{PREFIX}.n_kv_head", self.n_kv_head, expected)
        is_even = self.head_width % 2 == 0
        expected = "an even number, because of RoPE."
        expect(is_even, f"{PREFIX}: the head width", self.head_width, expected)

    def _check_numbers(self) -> None:
        for key in ("init_std", "norm_eps", "rope_theta"):
            value = getattr(self, key)  # torch does not accept integers of more than 64 bits
            expect(0 < value <= 1e12, f"{PREFIX}.{key}", value, "a number above 0, at most 1e12.")
        roles = ["matrix", "head", "embedding"]
        if self.n_expert:
            roles.insert(1, "router")
        for role, std in self.init_std_by_role.items():
            expect_known(f"role in {PREFIX}.init_std_by_role", role, roles)
            key = f"{PREFIX}.init_std_by_role.{role}"
            expect(0 <= std <= 1e12, key, std, "a number from 0 to 1e12.")

    def _check_experts(self) -> None:
        n_shared = self.n_expert_shared
        expect(
            n_shared in (0, 1), f"{PREFIX}.n_expert_shared", n_shared, "0 or 1. Its width is d_ff."
        )
        if self.router.gate_shared and not n_shared:
            found = f"{PREFIX}.router.gate_shared needs a shared expert"
            raise ConfigError(f"{found}; set n_expert_shared to 1.")
        if self.n_expert == 0:
            expected = "the default, because n_expert is 0. Set n_expert."
            expect(self.router == RouterConfig(), f"{PREFIX}.router", "set", expected)
            return

        n_active = self.n_expert_active
        if n_active == 1 and self.router.renormalize:
            why = "because one renormalized weight is always 1 and has no gradient"
            hint = "Set router.renormalize to false."
            raise ConfigError(f"{PREFIX}.n_expert_active is 1; expected 2 or more, {why}. {hint}")
        expected = f"more than n_expert_active {n_active}, or 0 for a dense FFN."
        fits = n_active < self.n_expert <= MAX_WIDTH
        expect(fits, f"{PREFIX}.n_expert", self.n_expert, expected)

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.d_head or self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_kv_head or self.n_head

    @property
    def ffn_width(self) -> int:
        """Hidden width of the dense feed-forward network, and of a shared expert."""
        return self.d_ff or int(8 * self.d_model / 3)

    @property
    def expert_width(self) -> int:
        """Hidden width of one sparse expert."""
        return self.d_expert or int(2 * self.d_model / 3)
