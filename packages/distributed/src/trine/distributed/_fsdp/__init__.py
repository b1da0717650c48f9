"""The engine behind `fully_shard`. Private: the public names are in `trine.distributed.fsdp`."""
