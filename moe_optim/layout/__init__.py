"""Where everything lies, as frozen values computed without a device."""
