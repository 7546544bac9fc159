"""The dashboard of a run in the browser: live pages of a running run, and pages or a file of a finished one."""
