"""Reports: the plan and its cost as tables and JSON, for people and for machines."""
