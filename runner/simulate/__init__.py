"""`runner simulate`: how much of a run's time would count, under failures."""
