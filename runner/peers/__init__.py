"""The connections between the nodes of a run: who may join, what they say, how they are kept up."""
