"""`ichat.pyz convert`: other gateways' configurations, LiteLLM's and llama-swap's, written as iChat's TOML."""
