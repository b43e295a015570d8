"""The front door that both roles listen with, and the way from it to an upstream."""
