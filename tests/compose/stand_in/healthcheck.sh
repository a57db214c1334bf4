#!/bin/bash
# In place of the MariaDB image's script of this name: does the server greet whoever connects?
exec 3<>/dev/tcp/127.0.0.1/3306 && read -r -t 3 -N 1 _ <&3
