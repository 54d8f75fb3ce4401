"""How the processes of a job do one thing together: join, compare plans, bring parts, and decide once."""
