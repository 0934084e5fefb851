"""What a session of `runner start` is about: its folder, the job, its location, the machines that it leaves out."""
