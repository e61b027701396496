"""Tables of torch operations for the classification; add new operations here."""

from typing import NamedTuple

CONVOLUTIONS = ("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution")
#: operation -> the arguments of a product: activations and a matrix
PRODUCTS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("mm", "bmm", "_grouped_mm"), ("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), ("mat1", "mat2")),
    **dict.fromkeys(("addbmm", "baddbmm"), ("batch1", "batch2")),
    **dict.fromkeys(("linear", *CONVOLUTIONS), ("input", "weight")),
    "mv": ("self", "vec"),
    "dot": ("self", "tensor"),
    "addmv": ("mat", "vec"),
    "mkldnn::_linear_pointwise": ("X", "W"),
    "lightning_sv::grouped_mm": ("x", "weight"),
}
#: products of a matrix per index of the first axis
BATCHED = frozenset({"bmm", "baddbmm", "addbmm"})
#: products whose matrix is (out, in), as in nn.Linear; that of the others is (in, out)
TRANSPOSED = {"linear", "mkldnn::_linear_pointwise"}
#: arguments that a product adds
ADDENDS = frozenset({"self", "bias", "B"})


class Norm(NamedTuple):
    """Arguments of a norm with its scale vector and its bias."""

    weight: str
    bias: str


#: operation -> its arguments; its first output is the result
NORMS: dict[str, Norm] = {
    **dict.fromkeys(("rms_norm", "_fused_rms_norm"), Norm("weight", bias="")),
    **dict.fromkeys(
        (
            "native_layer_norm", "native_group_norm", "native_batch_norm",
            "_native_batch_norm_legit_no_training", "_batch_norm_no_update", "cudnn_batch_norm",
            "miopen_batch_norm",
        ),
        Norm("weight", bias="bias"),
    ),
}  # fmt: skip
NO_NORM = Norm("", bias="")
#: norms whose scale vector varies along the second axis; that of the others along the last
CHANNELS_FIRST = frozenset(NORMS) - {"rms_norm", "_fused_rms_norm", "native_layer_norm"}
LOOKUPS = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only"})
#: attention as one operation, linear in its value, channel by channel
ATTENTION = frozenset(
    {
        "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math_for_mps",
    }
)  # fmt: skip
#: arguments of attention that it adds to the scores
MASKS = frozenset({"attn_mask", "attn_bias"})

#: operations that keep the values, at a different position or precision
COPIES = frozenset(
    {
        "_to_copy", "_unsafe_view", "clone", "contiguous", "view_copy", "expand_copy", "repeat",
        "repeat_interleave", "lift_fresh", "lift_fresh_copy", "alias", "detach", "constant_pad_nd",
        "flip", "roll", "neg", "_conj_physical", "split_with_sizes_copy", "_reshape_copy",
        "as_strided",  # of a mean, in the pooling of Swin to one position
    }
)  # fmt: skip
#: operation -> the arguments whose rows are selected, moved or gathered
ROWS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("index", "index_select", "gather", "_unsafe_index", "masked_select"), ("self",)
    ),
    **dict.fromkeys(("cat", "stack"), ("tensors",)),
    **dict.fromkeys(
        ("copy", "_copy", "scatter", "slice_scatter", "select_scatter"), ("self", "src")
    ),
    **dict.fromkeys(("index_copy", "masked_scatter"), ("self", "source")),
    **dict.fromkeys(("index_put", "_index_put_impl"), ("self", "values")),
}
#: operations that select rows of a table by index
CHOICES_OF_ROWS = frozenset({"index", "index_select", "gather", "_unsafe_index"})
#: operations that select parts of an axis
SPLITS = frozenset(
    {"split", "split_with_sizes", "slice", "glu", "unbind", "select", "index_select"}
)
SUMS = frozenset({"add", "sub", "rsub", "_add_relu"})


class Term(NamedTuple):
    """A product of arguments, possibly over others."""

    factors: tuple[str, ...]
    divisors: tuple[str, ...] = ()


#: operation -> the terms of its sum
TERMS: dict[str, tuple[Term, ...]] = {
    **dict.fromkeys(("add", "sub", "rsub"), (Term(("self",)), Term(("other",)))),
    **dict.fromkeys(("div", "true_divide"), (Term(("self",), ("other",)),)),
    "mul": (Term(("self", "other")),),
    "addcmul": (Term(("self",)), Term(("tensor1", "tensor2"))),
    "addcdiv": (Term(("self",)), Term(("tensor1",), ("tensor2",))),
    "lerp": (Term(("self",)), Term(("self", "weight")), Term(("end", "weight"))),
    "where": (Term(("condition", "self")), Term(("condition", "other"))),
    "masked_fill": (Term(("self", "mask")), Term(("value",))),
}
#: sums over axes
MEANS = frozenset({"mean", "sum"})
#: operation -> the arguments that it multiplies
MULTIPLIED: dict[str, frozenset[str]] = {
    **dict.fromkeys(("mul", "div", "true_divide"), frozenset({"self", "other"})),
    **dict.fromkeys(("addcmul", "addcdiv"), frozenset({"tensor1", "tensor2"})),
    **dict.fromkeys(("lerp", "_prelu_kernel", "prelu"), frozenset({"weight"})),
    "_weight_norm_interface": frozenset({"v", "g"}),
}
SOFTMAX = frozenset({"_softmax", "softmax", "_safe_softmax"})
#: operations between a product and the selection of experts, or the output
SCORES = SOFTMAX | {
    "_log_softmax", "log_softmax", "sigmoid", "tanh", "softplus", "exp", "sqrt", "masked_fill",
    "where", "clamp", "add", "sub", "mul", "div", "sum",
}  # fmt: skip
#: powers, of which a norm or a cap by hand is made
POWERS = frozenset({"pow", "square", "rsqrt", "reciprocal"})
#: sizes of a value, by which a norm by hand divides
STATISTICS = frozenset({"var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm"})
CHOICES = frozenset({"topk", "sort", "argsort", "argmax", "max", "kthvalue"})
#: operations only before the output
LOSSES = frozenset(
    {"nll_loss_forward", "nll_loss2d_forward", "mean", "gather", "ne", "eq", "argmax"}
)

#: operations on several tensors that are not linear, in addition to those that torch tags as
#: pointwise; those of torch on one tensor need no row
MIXING = (
    ATTENTION
    | CHOICES
    | frozenset(NORMS)
    | {
        "maximum", "minimum", "_cdist_forward", "index_add", "scatter_add", "scatter_reduce",
        "index_reduce", "grid_sampler_2d",
        "grid_sampler_3d", "_local_scalar_dense", "nonzero", "unique", "_unique2", "histc",
        "bincount", "one_hot", "linalg_cross", "_prelu_kernel", "prelu", "rrelu_with_noise",
        "mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits",
    }
)  # fmt: skip
#: operations that join a parameter to activations, without multiplying them
JOINS = frozenset(ROWS) | {
    "index_add",
    "scatter_add",
    "where",
    "masked_fill",
    "maximum",
    "minimum",
    "expand",
    "lerp",
    "addcmul",
    "addcdiv",
    "pow",
}
#: pointwise operations that indicate a quantized linear map
QUANTIZES = frozenset({"round"})
