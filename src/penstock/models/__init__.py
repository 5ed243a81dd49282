"""Where models live: loading and measuring a copy in this process."""
