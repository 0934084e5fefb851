"""What tests share: small trainings, ranks as threads, doubles of nodes, servers, and files to read."""
