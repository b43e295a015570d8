"""iChat: one gateway and many workers that serve large language models on one's own hardware."""

__version__ = "0.1.0"
