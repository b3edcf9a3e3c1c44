"""What of the hosts is wrong or not alike, found before a job starts."""
