"""What a run did, to look at: report.html, report.md, curves in a terminal. It reads run folders only."""
