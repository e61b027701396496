"""Conversion to transformers: Llama, Qwen 3, Gemma 3 and Qwen's experts."""
