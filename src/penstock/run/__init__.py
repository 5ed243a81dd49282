"""What every engine needs to run a plan: splits, the schedule, the coordinator, what becomes of output, the accounts."""
