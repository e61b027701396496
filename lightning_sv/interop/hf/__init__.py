"""Conversion to and from transformers: Llama, Mistral, Qwen 3; to Gemma 3 and Qwen's experts."""
