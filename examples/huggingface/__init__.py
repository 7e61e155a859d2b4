"""portakern's attention inside Hugging Face transformers, through its public attention interface."""
