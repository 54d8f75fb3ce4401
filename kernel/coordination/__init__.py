"""The processes of a job do one thing together: they join, compare plans, bring parts, and decide once."""
