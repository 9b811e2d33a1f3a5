// What this document is: the page of a gateway, or a timeline that was saved from one.

import {begin} from "./frame.js";
import {showSaved} from "./saved.js";

if (!showSaved()) begin();
