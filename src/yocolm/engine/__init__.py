"""The engine: continuous batching with fast prefill. Import its modules directly."""
