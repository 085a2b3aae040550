"""What commands share: files, tables, command lines and how things are spelt."""
