"""The sizes of a backbone, and what the paper leaves open about it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BackboneConfig:
    """A Pre-Norm Llama: RoPE, SwiGLU, RMSNorm, no biases, untied embeddings.

    The defaults of what is not a size are readings of the paper (README, "Readings").

    Attributes:
        name: the model's name in runs, figures and the table of tuned learning rates.
        d_model: width of the residual stream.
        n_layer: number of blocks.
        n_head: number of attention heads (multi-head attention: as many keys as queries).
        vocab_size: rows of the embedding and of the lm_head, padding included.
        d_head: width of a head; null for d_model / n_head.
        d_ff: hidden width of the SwiGLU; null for int(8 d_model / 3).
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in every norm.
        init_std: standard deviation of the normal initialization of every matrix.
        init_residual_scaling: divide the std of o_proj and down_proj by sqrt(2 n_layer).
    """

    d_model: int
    n_layer: int
    n_head: int
    vocab_size: int = 50_304
    name: str = "custom"
    d_head: int | None = None
    d_ff: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    init_residual_scaling: bool = True

    def __post_init__(self) -> None:
        where = "model.backbone"
        for key in ("d_model", "n_layer", "n_head", "vocab_size", "d_head", "d_ff"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{where}.{key} is {value}; it must be at least 1.")
        if self.d_head is None and self.d_model % self.n_head:
            raise ValueError(
                f"{where}.d_model {self.d_model} is not divisible by n_head {self.n_head}; "
                "change one of them or set d_head."
            )
        if self.head_width % 2:
            raise ValueError(f"{where}: the head width {self.head_width} is odd; RoPE needs an even one.")
        if self.init_std <= 0:
            raise ValueError(f"{where}.init_std is {self.init_std}; it must be positive.")

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.d_head or self.d_model // self.n_head

    @property
    def ffn_width(self) -> int:
        """Hidden width of the feed-forward network."""
        return self.d_ff or int(8 * self.d_model / 3)
