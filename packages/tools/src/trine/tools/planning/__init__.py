"""What `trine plan` asks of a planner, and how its answer is read."""
