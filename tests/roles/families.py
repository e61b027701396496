"""Tiny models of transformers, one row per family, and the expected roles of their parameters.

The expected roles are from the architecture, by hand. `input`, `output` and so on are the ends of
names, without numbers and '.weight'. Names give the others: *.bias is a bias, embeddings and the
head are called so, the rest has two axes or more and is a matrix. `to_one` are vectors stored as w
of a factor 1 + w; '*' is all of them.
"""

import re
from typing import Any

import torch
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EMBEDDINGS = {
    "embed_tokens", "wte", "wpe", "embed_in", "word_embeddings", "position_embeddings", "token_type_embeddings",
    "embed_positions", "embeddings", "embed_tokens_per_layer", "relative_attention_bias", "shared", "tok_embeddings",
}  # fmt: skip
HEADS = ("lm_head", "embed_out", "output_projection", "decoder", "classifier")
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
LLAMA = "input_layernorm post_attention_layernorm norm"
MOE = {
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
GROUPS = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}


def image(width: int) -> dict[str, Any]:
    """A square image. Roles do not depend on the values, so a 1 is expanded."""
    return {"pixel_values": torch.ones(()).expand(1, 3, width, width)}


def ids(inner: list[int] | None = None) -> Tensor:
    """16 token ids with those of an image in the middle."""
    return torch.tensor([[*range(4, 12), *(inner or []), *range(12, 20)]])


IMAGE = 60  #: token that stands for a patch of an image


class Family:
    """One row: its config and the truth.

    `kept` are input vectors that no matrix can take up. `example` has the inputs of a model that
    does not read token ids alone.
    """

    def __init__(
        self, name: str, config: dict[str, Any] | None = None, variant: str = "", auto: str = "AutoModelForCausalLM",
        to_one: str = "", kept: str = "", example: dict[str, Any] | None = None, **roles: str,
    ) -> None:  # fmt: skip
        self.name = name
        self.config = config or {}
        self.auto = auto
        self.roles = roles
        self.to_one = to_one
        self.kept = kept
        self.example = example
        self.id = f"{name}-{variant}" if variant else name

    def build(self) -> nn.Module:
        import transformers

        sizes = {key: value for key, value in (SIZES | self.config).items() if value is not None}
        config = transformers.AutoConfig.for_model(self.name, **sizes)
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, self.auto).from_config(config)
        return model

    def truth(self, name: str, parameter: nn.Parameter) -> str:
        for role, ends in self.roles.items():
            if ends_in(name, ends):
                return role
        plain = cut(name)
        if plain.endswith("bias") and not plain.endswith("relative_attention_bias"):
            return "bias"
        last = plain.rpartition(".")[2]
        if last in EMBEDDINGS:
            return "embedding"
        if last in HEADS:
            return "head"
        assert parameter.ndim > 1, f"{self.id}: the row does not say what {name} is"
        return "matrix"


def cut(name: str) -> str:
    """A name without numbers and without '.weight'."""
    return re.sub(r"\.\d+(?=\.|$)", "", name).removesuffix(".weight")


def ends_in(name: str, ends: str) -> bool:
    """Whether a name ends in one of these words, at a dot; a word with numbers is looked for in the
    name itself."""
    for end in ends.split():
        has_number = re.search(r"\.\d+(\.|$)", end)
        candidate = name.removesuffix(".weight") if has_number else cut(name)
        if f".{candidate}".endswith(f".{end}"):
            return True
    return False


def alike(names: str, config: dict[str, Any] | None = None, **roles: str) -> list[Family]:
    """Rows that differ in their name alone."""
    return [Family(name, config, **roles) for name in names.split()]


# fmt: off
FAMILIES = [
    # pre-norm
    *alike("llama mistral ministral qwen2 phi3 stablelm glm granite seed_oss arcee helium", input=LLAMA),
    Family("llama", {"attention_bias": True, "mlp_bias": True}, input=LLAMA, variant="biases"),
    Family("qwen2", {"tie_word_embeddings": True}, input=LLAMA, kept="model.norm", variant="tied"),
    Family("qwen3", input=LLAMA, output="q_norm k_norm"),
    Family("gemma", input=LLAMA, kept="model.norm", to_one="*"),
    Family("phi", input="input_layernorm final_layernorm"),
    Family("gpt2", GPT2, input="ln_1 ln_2 ln_f", kept="ln_f"),
    Family("gpt_neox", input="input_layernorm post_attention_layernorm final_layer_norm"),
    Family("gpt_neox", {"use_parallel_residual": False},
        input="input_layernorm post_attention_layernorm final_layer_norm", variant="sequential"),
    Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, input="self_attn_layer_norm final_layer_norm",
        kept="decoder.final_layer_norm"),
    Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False,
        "tie_word_embeddings": False}, input="layers.1.final_layer_norm",
        output="self_attn_layer_norm layers.0.final_layer_norm", variant="post-norm"),
    Family("bloom", {"n_layer": 2, "n_head": 4}, input="input_layernorm post_attention_layernorm ln_f",
        output="word_embeddings_layernorm", kept="ln_f"),
    Family("falcon", {"head_dim": None, "multi_query": True}, input="input_layernorm ln_f", kept="ln_f"),
    Family("falcon", {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2},
        input="ln_attn ln_mlp ln_f", kept="ln_f", variant="40b"),
    Family("olmo"),
    *alike("starcoder2 smollm3 ernie4_5", input=LLAMA, kept="model.norm"),
    Family("nemotron", input=LLAMA, to_one="*"),
    *alike("cohere cohere2", input="input_layernorm norm", kept="model.norm"),
    Family("cohere", {"use_qk_norm": True}, input="input_layernorm norm", output="q_norm k_norm", kept="model.norm",
        variant="qk-norm"),
    Family("hunyuan_v1_dense", input=LLAMA, output="query_layernorm key_layernorm"),
    Family("nanochat"),
    Family("apertus", input="attention_layernorm feedforward_layernorm norm", output="q_norm k_norm",
        other="alpha_p alpha_n"),
    Family("bitnet", input=f"{LLAMA} attn_sub_norm ffn_sub_norm"),
    Family("lfm2", {"layer_types": ["conv", "full_attention"]}, input="operator_norm ffn_norm embedding_norm",
        output="q_layernorm k_layernorm", kept="embedding_norm"),
    Family("diffllama", input=LLAMA, other="lambda_q1 lambda_k1 lambda_q2 lambda_k2"),
    # norms after blocks
    Family("gemma2", input="input_layernorm pre_feedforward_layernorm norm",
        output="post_attention_layernorm post_feedforward_layernorm", kept="model.norm", to_one="*"),
    Family("gemma3_text", input="input_layernorm pre_feedforward_layernorm norm",
        output="post_attention_layernorm post_feedforward_layernorm q_norm k_norm", kept="model.norm", to_one="*"),
    *alike("olmo2 olmo3 exaone4", input="norm",
        output="post_attention_layernorm post_feedforward_layernorm q_norm k_norm"),
    Family("glm4", input=LLAMA, output="post_self_attn_layernorm post_mlp_layernorm"),
    # mixtures of experts
    Family("mixtral", MOE, input=LLAMA, router="mlp.gate"),
    Family("qwen2_moe", MOE | {"shared_expert_intermediate_size": 16}, input=LLAMA, router="mlp.gate"),
    *alike("qwen3_moe olmoe minimax_m2", MOE, input=LLAMA, output="q_norm k_norm", router="mlp.gate"),
    Family("granitemoe", MOE, input=LLAMA, router="router"),
    Family("phimoe", MOE, input=LLAMA, router="mlp.router"),
    Family("gpt_oss", MOE, input=LLAMA, router="router", bias="gate_up_proj_bias down_proj_bias", other="sinks"),
    Family("llama4_text", MOE | {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 48}, input=LLAMA,
        router="router"),
    Family("deepseek_v2", MOE | MLA | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy"}, input=f"{LLAMA} q_a_layernorm kv_a_layernorm", router="mlp.gate"),
    Family("deepseek_v3", MOE | MLA | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
        input=f"{LLAMA} q_a_layernorm kv_a_layernorm", router="mlp.gate"),
    Family("glm4_moe", MOE | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, input=LLAMA,
        router="mlp.gate"),
    # state spaces, linear attention, hybrids
    Family("mamba", {"state_size": 4}, input="norm norm_f", multiplier="A_log D", kept="norm_f"),
    Family("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1}, input="norm norm_f",
        multiplier="A_log D", bias="dt_bias"),
    Family("jamba", MOE | {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        input="input_layernorm pre_ff_layernorm final_layernorm dt_layernorm", output="b_layernorm c_layernorm",
        router="feed_forward.router", multiplier="A_log D"),
    Family("granitemoehybrid", MOE | MAMBA | {"layer_types": ["mamba", "attention"], "layers_block_type": ["mamba",
        "attention"], "shared_intermediate_size": 16}, input=f"{LLAMA} mamba.norm", router="router",
        multiplier="A_log D", bias="dt_bias"),
    Family("recurrent_gemma", {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
        input="temporal_pre_norm channel_pre_norm final_norm", bias="input_gate_bias recurrent_gate_bias",
        multiplier="recurrent_param", kept="final_norm", to_one="*"),
    Family("qwen3_next", MOE | LINEAR | {"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention",
        "full_attention"]}, input=LLAMA.replace("norm norm", "norm model.norm"),
        output="q_norm k_norm linear_attn.norm", router="mlp.gate", multiplier="A_log", bias="dt_bias",
        to_one="input_layernorm post_attention_layernorm model.norm q_norm k_norm"),
    Family("minimax", MOE | {"layer_types": ["linear_attention", "full_attention"]}, input="model.norm",
        output="input_layernorm post_attention_layernorm self_attn.norm", router="mlp.gate"),
    # held out: no rule was changed for these; what a row left out at first was added from the
    # family's code
    *alike("cwm jais2 ministral3 internlm3", input=LLAMA),
    Family("minicpm3", MLA, input=f"{LLAMA} q_a_layernorm kv_a_layernorm", kept="model.norm"),
    Family("mimo_v2_flash", MOE | GROUPS, input=LLAMA, router="mlp.gate", other="sinks"),
    Family("falcon_h1", MAMBA | {"mamba_d_ssm": 64}, input="input_layernorm pre_ff_layernorm final_layernorm",
        multiplier="A_log D", bias="dt_bias"),
    Family("nemotron_h", MOE | {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 1}, input="norm norm_f mixer.norm", router="mixer.gate",
        multiplier="A_log D", bias="dt_bias"),
    Family("kimi_linear", MOE | MLA | GROUPS,
        input="input_layernorm post_attention_layernorm model.norm kv_a_layernorm", output="o_norm", router="mlp.gate",
        multiplier="A_log", bias="dt_bias"),
    Family("olmo_hybrid", {"layer_types": ["linear_attention", "full_attention"]},
        input="input_layernorm layers.0.post_attention_layernorm model.norm",
        output="q_norm k_norm layers.1.post_attention_layernorm post_feedforward_layernorm o_norm", multiplier="A_log",
        bias="dt_bias"),
    Family("qwen3_5_text", LINEAR | {"layer_types": ["linear_attention", "full_attention"]},
        input="input_layernorm post_attention_layernorm model.norm", output="q_norm k_norm linear_attn.norm",
        multiplier="A_log", bias="dt_bias", to_one="input_layernorm post_attention_layernorm model.norm q_norm k_norm"),
    Family("zamba2", {"mamba_headdim": 8, "n_mamba_heads": 8, "mamba_d_state": 4, "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "attention_hidden_size": 64,
        "num_key_value_heads": 4}, input="input_layernorm pre_ff_layernorm final_layernorm mamba.norm",
        multiplier="A_log D", bias="dt_bias", kept="final_layernorm"),
    Family("modernbert-decoder", {"global_attn_every_n_layers": 2},
        input="attn_norm mlp_norm final_norm head.norm lm_head.norm", output="embeddings.norm", kept="lm_head.norm"),
    *alike("laguna hy_v3", MOE, input=LLAMA, output="q_norm k_norm", router="mlp.gate"),
    # encoders
    Family("t5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        input="layer_norm final_layer_norm", kept="decoder.final_layer_norm", auto="AutoModelForSeq2SeqLM"),
    # speech
    Family("whisper", dict.fromkeys(SIZES) | {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "vocab_size": 64, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        input="self_attn_layer_norm encoder_attn_layer_norm final_layer_norm layer_norm", kept="decoder.layer_norm",
        auto="AutoModelForSpeechSeq2Seq",
        example={"input_features": torch.ones(1, 8, 40), "decoder_input_ids": ids(), "use_cache": False}),
    Family("bert", input="layer.1.output.LayerNorm transform.LayerNorm", output="embeddings.LayerNorm output.LayerNorm",
        kept="transform.LayerNorm", auto="AutoModelForMaskedLM"),
    Family("modernbert", {"global_attn_every_n_layers": 2}, input="attn_norm mlp_norm final_norm head.norm",
        output="embeddings.norm", kept="head.norm", auto="AutoModelForMaskedLM"),
    Family("vit", {"image_size": 8, "patch_size": 4}, input="layernorm_before layernorm_after layernorm",
        bias="position_embeddings", other="cls_token", auto="AutoModelForImageClassification", example=image(8)),
    # an image and tokens
    Family("llava", {"text_config": {"model_type": "llama"} | SIZES,
        "vision_config": {"model_type": "clip_vision_model"} | VISION, "image_token_index": IMAGE},
        input=f"{LLAMA} layer_norm1 layer_norm2", output="pre_layrnorm post_layernorm", other="class_embedding",
        embedding="position_embedding", auto="AutoModelForImageTextToText",
        example=image(16) | {"input_ids": ids([IMAGE] * 16), "use_cache": False}),
    Family("gemma3", {"text_config": SIZES, "vision_config": {"model_type": "siglip_vision_model",
        "vision_use_head": False} | VISION, "image_token_index": IMAGE, "mm_tokens_per_image": 4},
        input="input_layernorm pre_feedforward_layernorm norm layer_norm1 layer_norm2 mm_soft_emb_norm",
        output="post_attention_layernorm post_feedforward_layernorm q_norm k_norm post_layernorm",
        embedding="position_embedding", kept="language_model.norm",
        to_one="input_layernorm pre_feedforward_layernorm language_model.norm post_attention_layernorm "
        "post_feedforward_layernorm q_norm k_norm mm_soft_emb_norm",
        auto="AutoModelForImageTextToText",
        example=image(16) | {"input_ids": ids([IMAGE] * 4), "use_cache": False}),
    Family("qwen2_5_vl", {"text_config": SIZES | {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
        "patch_size": 4, "fullatt_block_indexes": [1], "window_size": 16}, "image_token_id": IMAGE, "video_token_id": 61,
        "vision_start_token_id": 62, "vision_end_token_id": 63}, input=f"{LLAMA} norm1 norm2 ln_q",
        auto="AutoModelForImageTextToText",
        example={"pixel_values": torch.ones(64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]]),
        "input_ids": ids([62] + [IMAGE] * 16), "mm_token_type_ids": ids([62] + [IMAGE] * 16).eq(IMAGE).long(),
        "use_cache": False}),
    # sums over positions
    Family("rwkv", {"attention_hidden_size": 32, "context_length": 32}, input="ln1 ln2 ln_out", output="pre_ln",
        bias="time_decay time_first", multiplier="time_mix_key time_mix_value time_mix_receptance", head="head"),
    Family("swin", dict.fromkeys(SIZES) | {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1],
        "num_heads": [2, 2], "window_size": 2}, input="layernorm_before layernorm_after downsample.norm swin.layernorm",
        output="embeddings.norm", embedding="relative_position_bias_table", auto="AutoModelForImageClassification", example=image(32)),
]
# fmt: on


def find(name: str) -> Family:
    return next(family for family in FAMILIES if family.id == name)
