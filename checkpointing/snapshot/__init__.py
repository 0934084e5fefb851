"""From the state of a step to a snapshot in the node's memory."""
