// /hosts/NAME: how is this host?

import { follow } from "./live.js";

follow();
