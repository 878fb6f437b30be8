"""What the server does with an aggregate, as `FinalizerProcess`."""
