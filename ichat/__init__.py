"""iChat: a gateway and many workers that serve large language models on your own hardware."""

__version__ = "0.1.0"
