"""`runner rehearse`: proves that a job resumes exactly, before it is started."""
