"""Services by which the processes of a job agree."""
