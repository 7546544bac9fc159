"""Coverage: which models, layers and operations train as they are."""
