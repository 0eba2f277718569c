"""One place that keeps bytes: the contract of a store (`base`) and the stores themselves, one file each."""
