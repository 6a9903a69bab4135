"""Work groups beside other systems that lease single records to workers."""
