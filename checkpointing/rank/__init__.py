"""What runs in a rank: snapshots, restoring, and agreement between ranks. Needs torch."""
