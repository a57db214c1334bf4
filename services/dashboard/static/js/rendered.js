// Pages that the server renders whole: incidents, one host, the decisions about a job.

import { follow } from "./live.js";

follow();
