// /incidents: what is wrong?

import { follow } from "./live.js";

follow();
