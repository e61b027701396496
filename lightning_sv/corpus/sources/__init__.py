"""Text sources: standard library, files and Hugging Face datasets, each a stream of documents."""
