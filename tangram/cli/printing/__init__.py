"""What a person or a program reads of a verb: columns, records, progress, colours."""
