"""The vocabulary of strategies: facts, plan, protocol, compose. Pure Python, imports no torch."""
