"""The configuration of a run: schema, loading, and checks that need more than one key."""
