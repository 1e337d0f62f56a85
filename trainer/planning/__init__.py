"""Planning: from a config or a live model to a plan, before anything is allocated."""
